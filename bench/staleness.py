"""How much staleness pays: speed and held-out reward of `guess` with max_staleness 0, 1, 2 and 4.

    python -m bench.staleness --steps 500 --seeds 2 --tool-latency lognormal:10:1.0 > staleness.txt
    tail -1 staleness.txt > bench/results/staleness-cpu-2cores.json && make docs     # the table of docs/async.md

Every seed trains once with each bound: the recipe of run.py, equal steps, rows, first weights and tool latency. With
max_staleness K, concurrency is (1 + K) batches and admit_ahead is K, so that each bound is used to the full; 0 and 2
are then the two modes of run.py. Which bound begins changes from seed to seed, so that a machine that gets slower
favours none. Every run's events.jsonl is audited, and a finding ends the bench without a report.

Speeds, waits and ages are those of bench/async_vs_sync.py, held-out reward its final evaluation: mean reward of
held-out games under the last policy, at the training temperature.

These options take a quarter of an hour on two idle cores, the defaults over an hour. Exit codes: 0 done, 1 a run or its
audit failed, 2 bad options, 130 Ctrl-C. The last line on stdout is JSON with every number; progress goes to stderr.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.arm import TASK, run_audited
from bench.command import BenchCommand, result_head, run_root
from bench.ideal import steady_speed
from bench.measures import LAST_STEPS, read_lines, segment_ages
from bench.staleness_report import StalenessArm, arms_json, caption, markdown_table, summary
from pipeline.commands.make_run_config import build
from pipeline.commands.run_config import RunConfig, task_defaults
from pipeline.evaluation.evaluator import Evaluation

BOUNDS = (0, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the bench is told."""

    steps: int = task_defaults(TASK)["steps"]
    seeds: int = 3
    tool_latency: str = "lognormal:20:1.0"
    eval_games: int = 1024
    device: str = "auto"
    samplers: int | None = None
    out: str | None = None


def bench(plan: Plan) -> None:
    with run_root(plan.out) as root:
        measure_all(plan, root)


def all_configs(plan: Plan) -> list[RunConfig]:
    return [config_of(plan, bound, seed, Path(plan.out or "unused")) for bound, seed in arms_of(plan)]


def arms_of(plan: Plan) -> list[tuple[int, int]]:
    """(max_staleness, seed) of each run, in order."""
    arms = []
    for seed in range(plan.seeds):
        first = seed % len(BOUNDS)
        arms += [(bound, seed) for bound in BOUNDS[first:] + BOUNDS[:first]]
    return arms


def config_of(plan: Plan, bound: int, seed: int, root: Path) -> RunConfig:
    """What run.py makes of the same options."""
    defaults = task_defaults(TASK)
    values = {
        "mode": "async" if bound else "sync",
        "task": TASK,
        "max_staleness": bound,
        "admit_ahead": bound,
        "concurrency": (1 + bound) * defaults["groups_per_step"] * defaults["group_size"],
        "steps": plan.steps,
        "seed": seed,
        "tool_latency": plan.tool_latency,
        "device": plan.device,
        "samplers": plan.samplers,
        "run_dir": str(root / f"staleness-{bound}-seed-{seed}"),
    }
    return build(defaults | values)


def measure_all(plan: Plan, root: Path) -> None:
    """Run all arms and print the report."""
    arms = []
    for bound, seed in arms_of(plan):
        print(f"max_staleness {bound}, seed {seed}", file=sys.stderr, flush=True)
        arms.append(run_arm(plan, bound, seed, root))
    report = report_json(plan, arms, config_of(plan, 0, 0, root).device)
    print(f"{markdown_table(report['summary'])}\n\n{caption(report)}\n")
    print(json.dumps(report, allow_nan=False), flush=True)


def report_json(plan: Plan, arms: Sequence[StalenessArm], device: str) -> dict[str, Any]:
    return result_head("staleness", plan) | {
        "task": TASK,
        "device": device,
        "summary": summary(arms),
        "arms": arms_json(arms),
    }


def run_arm(plan: Plan, bound: int, seed: int, root: Path) -> StalenessArm:
    """One run in new processes, audited and measured."""
    config = config_of(plan, bound, seed, root)
    evaluation, load = run_audited(config, plan.eval_games)
    return measure(config, evaluation, load)


def measure(config: RunConfig, evaluation: Evaluation | None, load: float) -> StalenessArm:
    """From the files of a completed run."""
    run_dir = Path(config.run_dir)
    events, metrics = read_lines(run_dir / "events.jsonl"), read_lines(run_dir / "metrics.jsonl")
    ends = [line["time"] for line in metrics]
    ages = segment_ages(events)
    admitted_at = next(event["t"] for event in events if event["event"] == "admitted")
    return StalenessArm(
        seed=config.seed,
        max_staleness=config.trainer.max_staleness,
        concurrency=config.trainer.engine.schedule.concurrency,
        steps_per_second=steady_speed(ends),
        seconds=ends[-1] - admitted_at,
        bound_wait_frac=sum(line["staleness/wait_seconds"] for line in metrics[1:]) / (ends[-1] - ends[0]),
        age_mean=float(np.mean(ages)),
        age_p99=float(np.percentile(ages, 99)),
        age_max=max(ages),
        reward_last=float(np.mean([line["reward/mean"] for line in metrics[-LAST_STEPS:]])),
        holdout_reward=evaluation.reward_mean if evaluation else None,
        holdout_games=evaluation.trajectories if evaluation else 0,
        load=load,
    )


COMMAND = BenchCommand(
    doc=__doc__,
    plan=Plan,
    own={
        "seeds": (int, "seeds, counted from 0; each runs every bound"),
        "eval_games": (int, "least number of held-out games after each run; 0: none"),
        "out": (str, "where the run directories go and stay, as DIR/staleness-2-seed-0 and so on"),
    },
    minima={"steps": 2, "seeds": 1, "eval_games": 0},
    configs=all_configs,
    bench=bench,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
