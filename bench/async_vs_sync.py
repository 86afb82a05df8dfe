"""Asynchronous against synchronous training: the same task, batch, seeds and tool latency, side by side.

    python -m bench.async_vs_sync --steps 100 --seeds 3

Arms alternate (sync seed 0, async seed 0, sync seed 1, ...), each with processes of its own, with the recipe of run.py
and an equal number of steps; the two differ in the constants of run.py's modes and in nothing else. Every run's
events.jsonl is audited, and a finding ends the bench without a report.

Definitions
  steps/s           batches trained, from the end of the first step to the end of the last one: N-1 over that time.
                    Sampling ahead begins before that interval and ends within it, so over few steps async looks
                    better than it is: by up to max_staleness batches in N-1. The ideal is measured in the same way,
                    and "whole run" counts from the first admission.
  busy share        of the learner, in that interval: forward, backward, optimizer, publishing.
  waited            the trainer had no batch to train; "for the age bound": a full batch was ready, but training it
                    would have left another group too old.
  ages              versions between a segment's policy and the one that it trains, each segment counted once.
  ideal             the schedule alone on a virtual clock (bench/replay.py) with the arm's own segment, tool and
                    training times: bench/ideal.py says what that leaves out.
  achieved/ideal    the arm's steps/s over its ideal steps/s.
  final evaluation  mean reward of held-out games under the final version (at the training temperature).

Exit codes: 0 done, 1 a run or its audit failed, 2 bad options, 130 Ctrl-C. The last line on stdout is JSON with every
number; progress goes to stderr.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.arm import TASK, run_audited
from bench.command import BenchCommand, result_head, run_root
from bench.ideal import Work, ideal, ideal_speed
from bench.measures import read_run
from bench.report import MODES as ARMS
from bench.report import Arm, Pair, pair_json, pair_table, summary, summary_text
from pipeline.commands.make_run_config import build
from pipeline.commands.run_config import MODES, RunConfig, task_defaults


@dataclass(frozen=True, slots=True)
class Plan:
    """What the bench is told."""

    steps: int = 100
    seeds: int = 3
    tool_latency: str = "lognormal:50:1.0"
    eval_games: int = 1000
    max_staleness: int = MODES["async"]["max_staleness"]
    device: str = "auto"
    samplers: int | None = None
    out: str | None = None


def bench(plan: Plan) -> None:
    with run_root(plan.out) as root:
        compare(plan, root)


def all_configs(plan: Plan) -> list[RunConfig]:
    root = Path(plan.out or "unused")
    return [config_of(plan, mode, seed, root) for seed in range(plan.seeds) for mode in ARMS]


def compare(plan: Plan, root: Path) -> None:
    """Run all arms and print the report."""
    config = config_of(plan, "async", 0, root)
    trainer = config.trainer
    print(
        f"async_vs_sync  {TASK}  {trainer.groups_per_step} x {trainer.group_size} trajectories a batch, {plan.steps} "
        f"steps, {plan.seeds} seeds, tool latency {plan.tool_latency}, {config.device}, {os.cpu_count()} cores\n",
        flush=True,
    )
    pairs = []
    for seed in range(plan.seeds):
        (sync, sync_work), (asynchronous, async_work) = (run_arm(plan, mode, seed, root) for mode in ARMS)
        uncontended = ideal_speed(ideal(async_work, times=sync_work)) / sync.measures.ideal_steps_per_second
        pairs.append(Pair(seed=seed, sync=sync, asynchronous=asynchronous, uncontended_ratio=uncontended))
        print(pair_table(pairs[-1]) + "\n", flush=True)
    print(summary_text(pairs) + "\n")
    print(json.dumps(report_json(plan, config, pairs), allow_nan=False))


def report_json(plan: Plan, config: RunConfig, pairs: Sequence[Pair]) -> dict[str, Any]:
    return result_head("async_vs_sync", plan) | {
        "task": TASK,
        "modes": {mode: mode_options(plan, mode) for mode in ARMS},
        "groups_per_step": config.trainer.groups_per_step,
        "group_size": config.trainer.group_size,
        "device": config.device,
        "summary": summary(pairs),
        "seeds": [pair_json(pair) for pair in pairs],
    }


def mode_options(plan: Plan, mode: str) -> dict[str, Any]:
    """All that the two arms differ in."""
    return MODES[mode] | ({"max_staleness": plan.max_staleness} if mode == "async" else {})


def config_of(plan: Plan, mode: str, seed: int, root: Path) -> RunConfig:
    """What run.py makes of the same options."""
    values = {
        "mode": mode,
        "task": TASK,
        "steps": plan.steps,
        "seed": seed,
        "tool_latency": plan.tool_latency,
        "device": plan.device,
        "samplers": plan.samplers,
        "run_dir": str(root / f"{mode}-{seed}"),
    }
    return build(task_defaults(TASK) | mode_options(plan, mode) | values)


def run_arm(plan: Plan, mode: str, seed: int, root: Path) -> tuple[Arm, Work]:
    """One run in new processes, audited and measured."""
    config = config_of(plan, mode, seed, root)
    evaluation, load = run_audited(config, plan.eval_games)
    measures, work = read_run(Path(config.run_dir))
    return Arm(mode=mode, measures=measures, evaluation=evaluation, load=load), work


COMMAND = BenchCommand(
    doc=__doc__,
    plan=Plan,
    own={
        "seeds": (int, "seeds, counted from 0; each runs both modes"),
        "eval_games": (int, "least number of held-out games after each run; 0: none"),
        "out": (str, "where the run directories go and stay, as DIR/async-0 and so on"),
    },
    minima={"steps": 2, "seeds": 1, "eval_games": 0, "max_staleness": 1},
    configs=all_configs,
    bench=bench,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
