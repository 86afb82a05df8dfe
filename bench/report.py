"""What the comparison prints: a table per seed, the ratios over seeds, what they leave out, and the same as JSON."""

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.measures import LAST_STEPS, Measures
from pipeline.evaluation.evaluator import Evaluation

MODES = ("sync", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One mode of one seed. evaluation: None if it was not asked for. load: the machine's 1-minute load before it."""

    mode: str
    measures: Measures
    evaluation: Evaluation | None
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both arms of one seed. uncontended_ratio: ideal speeds, async over sync, both with the times of sync's work."""

    seed: int
    sync: Arm
    asynchronous: Arm
    uncontended_ratio: float

    @property
    def arms(self) -> tuple[Arm, Arm]:
        return self.sync, self.asynchronous

    @property
    def ratio(self) -> float:
        return self.asynchronous.measures.steps_per_second / self.sync.measures.steps_per_second

    @property
    def ideal_ratio(self) -> float:
        return self.asynchronous.measures.ideal_steps_per_second / self.sync.measures.ideal_steps_per_second


ROWS: tuple[tuple[str, str, Callable[[Measures], float]], ...] = (
    ("steps/s", ".3f", lambda m: m.steps_per_second),
    ("steps/s, whole run", ".3f", lambda m: m.whole_steps_per_second),
    ("generated tokens/s", ".0f", lambda m: m.generated_tokens_per_second),
    ("learner busy share", ".3f", lambda m: m.learner_busy_frac),
    ("trainer waited, s", ".2f", lambda m: m.wait_seconds),
    ("  for the age bound, s", ".2f", lambda m: m.bound_wait_seconds),
    ("age p50", ".1f", lambda m: m.age_p50),
    ("age p99", ".1f", lambda m: m.age_p99),
    ("age max", "d", lambda m: m.age_max),
    (f"reward, last {LAST_STEPS} steps", ".3f", lambda m: m.reward_last),
    ("ideal steps/s", ".3f", lambda m: m.ideal_steps_per_second),
    ("achieved/ideal", ".3f", lambda m: m.achieved_of_ideal),
    ("work in a trajectory", ".3f", lambda m: m.trajectory_work_frac),
    ("work in an update", ".3f", lambda m: m.update_work_frac),
)
RATIOS = {"steps/s", "steps/s, whole run", "generated tokens/s", "ideal steps/s"}

NOTES = (
    "Speeds, waits and ages: from the end of the first step to the end of the last. Whole run: from the first "
    "admission. Starting the processes and the final evaluation are in neither.",
    "Ideal: the same schedule replayed with this arm's own segment, tool and training times and nothing else. It "
    "leaves out waiting for the sampler, messages, rendering, resets, rewards, making batches and the trainer's loop.",
    "Contention is not left out: two processes on the same cores slow each other's work, and those slower times are "
    "in the ideal. The ideal ratio with sync's times replays the async schedule with the work as long as sync's.",
    "Work in a trajectory, in an update: the share of its time (from its first request to its end; from the choice of "
    "the batch to its publication) that is work in the ideal's sense.",
    "Final evaluation: held-out games under the final version, sampled by the run's own engine at the training "
    "temperature. Its tool has the run's latency, which costs time but changes no result.",
)


def pair_table(pair: Pair) -> str:
    """Both arms of one seed, side by side."""
    lines = [f"{f'seed {pair.seed}':<24}{'sync':>10}{'async':>10}{'async/sync':>12}"]
    for label, form, value in ROWS:
        sync, asynchronous = (value(arm.measures) for arm in pair.arms)
        ratio = f"{asynchronous / sync:>11.2f}x" if label in RATIOS else ""
        lines.append(f"  {label:<22}{sync:>10{form}}{asynchronous:>10{form}}{ratio}")
    if pair.sync.evaluation is not None:
        sync, asynchronous = (arm.evaluation.reward_mean for arm in pair.arms)
        lines.append(f"  {'final evaluation':<22}{sync:>10.3f}{asynchronous:>10.3f}{asynchronous - sync:>+12.3f}")
    return "\n".join(lines)


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The ratios over all seeds: median and range; the evaluations: means."""
    spreads = {
        "steps_per_second_ratio": [pair.ratio for pair in pairs],
        "ideal_ratio": [pair.ideal_ratio for pair in pairs],
        "ideal_ratio_with_sync_times": [pair.uncontended_ratio for pair in pairs],
        "achieved_of_ideal_sync": [pair.sync.measures.achieved_of_ideal for pair in pairs],
        "achieved_of_ideal_async": [pair.asynchronous.measures.achieved_of_ideal for pair in pairs],
    }
    result: dict[str, Any] = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in spreads.items()
    }
    if pairs[0].sync.evaluation is not None:
        means = {
            mode: statistics.fmean(pair.arms[index].evaluation.reward_mean for pair in pairs)
            for index, mode in enumerate(MODES)
        }
        games = sum(pair.sync.evaluation.trajectories for pair in pairs)
        result["final_evaluation"] = means | {"difference": means["async"] - means["sync"], "games_per_mode": games}
    return result


def summary_text(pairs: Sequence[Pair]) -> str:
    """`summary` and what the numbers leave out, in lines."""
    found = summary(pairs)
    lines = [f"async/sync over {len(pairs)} seeds: median (range)"]
    for name, label in (
        ("steps_per_second_ratio", "steps/s ratio"),
        ("ideal_ratio", "ideal ratio"),
        ("ideal_ratio_with_sync_times", "ideal ratio, sync's times"),
        ("achieved_of_ideal_sync", "achieved/ideal, sync"),
        ("achieved_of_ideal_async", "achieved/ideal, async"),
    ):
        spread = found[name]
        lines.append(f"  {label:<26}{spread['median']:.3f}  ({spread['min']:.3f} to {spread['max']:.3f})")
    if "final_evaluation" in found:
        means = found["final_evaluation"]
        lines.append(
            f"  {'final evaluation':<26}sync {means['sync']:.3f}, async {means['async']:.3f}, difference "
            f"{means['difference']:+.3f}: means of {means['games_per_mode']} games each"
        )
    notes = [textwrap.fill(note, 118, subsequent_indent="  ") for note in NOTES]
    return "\n".join([*lines, "", *notes])


def arm_json(arm: Arm) -> dict[str, Any]:
    """One arm's numbers as plain values."""
    return asdict(arm.measures) | {
        "achieved_of_ideal": arm.measures.achieved_of_ideal,
        "final_evaluation": asdict(arm.evaluation) if arm.evaluation is not None else None,
        "load_before": arm.load,
        "audit_findings": 0,  # with any there would be no report
    }


def pair_json(pair: Pair) -> dict[str, Any]:
    """One seed's numbers as plain values."""
    return {
        "seed": pair.seed,
        "sync": arm_json(pair.sync),
        "async": arm_json(pair.asynchronous),
        "steps_per_second_ratio": pair.ratio,
        "ideal_ratio": pair.ideal_ratio,
        "ideal_ratio_with_sync_times": pair.uncontended_ratio,
    }
