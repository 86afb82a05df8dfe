"""What the staleness bench found: speed and held-out reward by max_staleness, as JSON and as a table for the docs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessArm:
    """One run. Speeds, waits and ages are those of batches 2 to N (bench/measures.py)."""

    seed: int
    max_staleness: int
    concurrency: int
    steps_per_second: float
    seconds: float  # from the first admission to the last update
    bound_wait_frac: float  # share of the interval in which the age bound held a full batch back
    age_mean: float  # versions, of segments
    age_p99: float
    age_max: int
    reward_last: float  # mean of the last 20 training batches
    holdout_reward: float | None  # None if not asked for
    holdout_games: int
    load: float  # the machine's 1-minute load before the run


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(arms: Sequence[StalenessArm]) -> list[dict[str, Any]]:
    """One entry per max_staleness. Ratios and differences are to the run of the same seed with the least one."""
    bounds = sorted({arm.max_staleness for arm in arms})
    peers = {arm.seed: arm for arm in arms if arm.max_staleness == bounds[0]}
    rows = []
    for bound in bounds:
        own = [arm for arm in arms if arm.max_staleness == bound]
        row: dict[str, Any] = {"max_staleness": bound, "concurrency": own[0].concurrency, "runs": len(own)}
        for name in ("steps_per_second", "seconds", "bound_wait_frac", "age_mean", "age_p99", "age_max"):
            row[name] = spread([getattr(arm, name) for arm in own])
        row["steps_per_second_ratio"] = spread([arm.steps_per_second / peers[arm.seed].steps_per_second for arm in own])
        if own[0].holdout_reward is not None:
            row["holdout_reward"] = spread([arm.holdout_reward for arm in own])
            row["holdout_reward_difference"] = spread(
                [arm.holdout_reward - peers[arm.seed].holdout_reward for arm in own]
            )
        rows.append(row)
    return rows


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """`summary` as the table of docs/async.md: medians over the seeds, with the range of what varies."""
    lines = [
        "| `max_staleness` | `concurrency` | steps/s | against 0 (same seed) | mean age | waits for the bound "
        "| held-out reward |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [
            str(row["max_staleness"]),
            str(row["concurrency"]),
            _range(row["steps_per_second"], ".2f"),
            f"{row['steps_per_second_ratio']['median']:.2f}x",
            f"{row['age_mean']['median']:.2f}",
            f"{row['bound_wait_frac']['median']:.0%}",
            _range(row["holdout_reward"], ".3f") if "holdout_reward" in row else "not measured",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def caption(report: Mapping[str, Any]) -> str:
    """What was run, in a sentence."""
    options = report["options"]
    games = report["arms"][0]["holdout_games"]
    return (
        f"{options['steps']} steps of `{report['task']}` with seeds 0 to {options['seeds'] - 1}, tool latency "
        f"{options['tool_latency']}, {report['device']}, {report['cores']} cores: medians, with the range over the "
        f"seeds. Reward: {games} held-out games a run under its last policy."
    )


def docs_section(report: Mapping[str, Any] | None, command: str) -> str:
    """The table and its caption for docs/async.md; report: the JSON of a stored result, None while there is none."""
    if report is None:
        return f"No result is stored yet; `{command}` measures one."
    return f"{markdown_table(report['summary'])}\n\n{caption(report)} Measured with `{command}`."


def arms_json(arms: Sequence[StalenessArm]) -> list[dict[str, Any]]:
    return [asdict(arm) for arm in arms]


def _range(values: Mapping[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"
