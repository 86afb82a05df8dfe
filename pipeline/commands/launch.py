"""One run of the command line: from a checked RunConfig to an exit code."""

import asyncio
import os
import signal
from contextlib import aclosing, suppress
from typing import Any

from pipeline.commands.parts import engine_of, supervisor_of, tell_endpoint, without_warnings
from pipeline.commands.progress import Progress
from pipeline.commands.resume import Resume
from pipeline.commands.run_config import RunConfig
from pipeline.commands.signals import EXIT_CODES, Signals, ignore_signals
from pipeline.commands.stored_config import STARTED_IN
from pipeline.commands.time_limit import TimeLimit
from pipeline.commands.workload import Workload, open_workload
from pipeline.evaluation.evaluator import Evaluator
from pipeline.supervisor import Supervisor
from pipeline.trainer import AsyncTrainer
from pipeline.wording import label


def run(config: RunConfig, resume: Resume | None = None) -> int:
    """Train as `config` says, showing how it goes; with `resume`, that run goes on. Returns 0 when every step was
    trained, 129, 130 or 143 after a signal, 143 when --max-minutes are over.
    """
    limit = TimeLimit(config.max_minutes) if config.max_minutes is not None else None
    try:
        workload = open_workload(config.workload)
        with make_supervisor(config) as model:
            trainer = make_trainer(model, config, workload, make_evaluator(config, workload))
            trainer.check(workload.train_rows(), config.steps)  # before anything is shown of the run
            if config.workload.task is None:
                print(workload.rows_line(), flush=True)
            return asyncio.run(_train(trainer, config, workload, limit, resume))
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


async def _train(
    trainer: AsyncTrainer, config: RunConfig, workload: Workload, limit: TimeLimit | None, resume: Resume | None
) -> int:
    signals = Signals(trainer)
    progress = Progress(
        steps=config.steps,
        mode=config.mode,
        concurrency=config.trainer.engine.schedule.concurrency,
        waits_for=lambda: trainer.waits_for,
        steps_before=resume.done if resume is not None else 0,
    )
    beside = [
        asyncio.create_task(progress.watch()),
        asyncio.create_task(tell_endpoint(trainer.engine, lambda: trainer.run_directory, progress.tell)),
    ]
    if limit is not None:
        beside.append(asyncio.create_task(_end_in_time(limit, config.max_minutes, signals, progress)))
    status = "failed"
    try:
        async with aclosing(_steps(trainer, config, workload, resume)) as steps:
            async for step in steps:  # a reader that goes away ends the run in order
                progress.show(step.n, step.metrics)
                if limit is not None:
                    limit.note("update", step.metrics["train/seconds"])
                    limit.note("save", trainer.save_seconds)
        status = "stopped" if trainer.stopped else "completed"
    except asyncio.CancelledError:
        status = "stopped"
    except BrokenPipeError:
        if signals.received is None:
            raise
        status = "stopped"  # the reader got that signal, too, and was gone before it came to us
    finally:
        ignore_signals()
        for task in beside:
            task.cancel()
        if resume is not None and trainer.was_complete:
            progress.end()
            progress.tell(resume.nothing_to_do)
        else:
            latest = trainer.evaluations[-1] if trainer.evaluations else None
            progress.close(status, trainer.run_directory, latest, trainer.checkpoint, left_unsaved=trainer.left_unsaved)
    if signals.received is not None:  # also when that was as the run ended
        return EXIT_CODES[signals.received]
    return 0


def _steps(trainer: AsyncTrainer, config: RunConfig, workload: Workload, resume: Resume | None) -> Any:
    """The run's generator of steps."""
    description = config.to_json() | {"workload": workload.describe()}
    description[STARTED_IN] = os.getcwd() if resume is None else resume.started_in
    return trainer.run(
        workload.train_rows(),
        config.steps,
        resume=None if resume is None else resume.run_dir,
        description=description,
    )


async def _end_in_time(limit: TimeLimit, minutes: float, signals: Signals, progress: Progress) -> None:
    await limit.over()
    if signals.received is None:
        with suppress(BrokenPipeError):  # of the reader that is gone a step's line tells
            progress.tell(f"--max-minutes {minutes:g} are nearly over: the run saves, and ends")
        signals.end_in_order(signal.SIGTERM)
