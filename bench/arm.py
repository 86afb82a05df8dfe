"""One run of a bench that compares whole runs: `guess`, trained in new processes, evaluated at its end, and audited."""

import asyncio
import os
import sys
import time
from pathlib import Path

from bench.measures import check_audit
from pipeline.commands.launch import make_supervisor, make_trainer
from pipeline.commands.progress import step_line
from pipeline.commands.run_config import RunConfig
from pipeline.commands.workload import open_workload
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.tasks import TASKS

TASK = "guess"
PROGRESS_SECONDS = 10.0  # least time between two lines of progress


def run_audited(config: RunConfig, games: int) -> tuple[Evaluation | None, float]:
    """Train as `config` says; returns the final evaluation on at least `games` games (None of none), and the machine's
    load average when the run began. Raises BenchError when the audit finds something.
    """
    load = os.getloadavg()[0]
    evaluation = asyncio.run(train(config, evaluator_of(games)))
    check_audit(Path(config.run_dir), config.steps)
    return evaluation, load


def evaluator_of(games: int) -> Evaluator | None:
    """At least `games` games after the last step: as many held-out rows as there are, each as often as it takes."""
    if games == 0:
        return None
    rows = TASKS[TASK].holdout_rows()[:games]
    return Evaluator(rows, every=0, final_group_size=-(-games // len(rows)))


async def train(config: RunConfig, evaluator: Evaluator | None) -> Evaluation | None:
    """`pipeline.commands.launch.run`, with an evaluation of the final version."""
    workload = open_workload(config.workload)
    with make_supervisor(config) as model:
        trainer = make_trainer(model, config, workload, evaluator)
        began = shown = 0.0  # the first step is shown at once, and speeds count from its end
        async for step in trainer.run(workload.train_rows(), config.steps, description=config.to_json()):
            now = time.monotonic()
            began = began or now
            if now - shown >= PROGRESS_SECONDS:
                shown = now
                speed = (step.n - 1) / max(now - began, 1e-9)
                line = step_line(config.mode, step.n, config.steps, speed, step.metrics)
                print(f"seed {config.seed}  {line}", file=sys.stderr, flush=True)
        return trainer.evaluations[-1] if trainer.evaluations else None
