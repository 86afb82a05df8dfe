"""One run of the command line: from a checked RunConfig to an exit code."""

import asyncio
from contextlib import aclosing

from pipeline.commands.parts import (
    EXIT_CODES,
    Signals,
    engine_of,
    ignore_signals,
    supervisor_of,
    tell_endpoint,
    without_warnings,
)
from pipeline.commands.progress import Progress
from pipeline.commands.run_config import RunConfig
from pipeline.commands.workload import Workload, open_workload
from pipeline.config_checks import label
from pipeline.evaluation.evaluator import Evaluator
from pipeline.supervisor import Supervisor
from pipeline.trainer import AsyncTrainer


def run(config: RunConfig) -> int:
    """Train as `config` says, showing how it goes. Returns 0 when every step was trained, 130 or 143 after a signal."""
    try:
        workload = open_workload(config.workload)
        with make_supervisor(config) as model:
            trainer = make_trainer(model, config, workload, make_evaluator(config, workload))
            trainer.check(workload.train_rows(), config.steps)  # before anything is shown of the run
            if config.workload.task is None:
                print(workload.rows_line(), flush=True)
            return asyncio.run(_train(trainer, config, workload))
    finally:
        ignore_signals()


def make_supervisor(config: RunConfig) -> Supervisor:
    """The processes' owner for `config`. Raises ConfigError when its model can't be used."""
    return supervisor_of(config, init=config.init, slots=config.slots)


def make_trainer(
    model: Supervisor, config: RunConfig, workload: Workload, evaluator: Evaluator | None = None
) -> AsyncTrainer:
    """The trainer that `config` describes, of its workload."""
    engine = engine_of(model, workload, config.trainer.engine)
    options = {name: getattr(config.trainer, name) for name in config.trainer.__slots__ if name != "engine"}
    with without_warnings():
        return AsyncTrainer(engine=engine, run_dir=config.run_dir, evaluator=evaluator, **options)


def make_evaluator(config: RunConfig, workload: Workload) -> Evaluator | None:
    """On the workload's held-out rows; None if `config` asks for no evaluation."""
    if config.eval_every is None:
        return None
    return Evaluator(
        workload.rows_to_measure(config.eval_rows, label(config, "eval_rows")),
        every=config.eval_every,
        group_size=config.eval_group_size,
        final_group_size=config.eval_final_group_size,
    )


async def _train(trainer: AsyncTrainer, config: RunConfig, workload: Workload) -> int:
    signals = Signals(trainer)
    progress = Progress(
        steps=config.steps,
        mode=config.mode,
        concurrency=config.trainer.engine.schedule.concurrency,
        waits_for=lambda: trainer.waits_for,
    )
    watching = asyncio.create_task(progress.watch())
    telling = asyncio.create_task(tell_endpoint(trainer.engine, lambda: trainer.run_directory, progress.tell))
    status = "failed"
    try:
        run = trainer.run(
            workload.train_rows(), config.steps, description=config.to_json() | {"workload": workload.describe()}
        )
        async with aclosing(run) as steps:  # a reader that goes away ends the run in order
            async for step in steps:
                progress.show(step.n, step.metrics)
        status = "stopped" if trainer.stopped else "completed"
    except asyncio.CancelledError:
        status = "stopped"
    finally:
        watching.cancel()
        telling.cancel()
        latest = trainer.evaluations[-1] if trainer.evaluations else None
        progress.close(status, trainer.run_directory, latest, trainer.checkpoint)
    return 0 if status == "completed" else EXIT_CODES[signals.received]
