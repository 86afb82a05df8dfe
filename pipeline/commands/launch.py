"""One run of the command line: from a checked RunConfig to an exit code."""

import asyncio
import signal
import warnings
from contextlib import aclosing
from typing import Protocol

from pipeline.commands.progress import Progress
from pipeline.commands.run_config import RunConfig
from pipeline.commands.task_choice import parse_template_options
from pipeline.config_checks import ConfigWarning
from pipeline.evaluation.evaluator import Evaluator
from pipeline.model_directory import TINY_NAME
from pipeline.rollout_engine import RolloutEngine
from pipeline.supervisor import Supervisor
from pipeline.tasks import TASKS
from pipeline.trainer import AsyncTrainer

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def run(config: RunConfig) -> int:
    """Train as `config` says, showing how it goes. Returns 0 when every step was trained, 130 or 143 after a signal."""
    try:
        with make_supervisor(config) as model:
            trainer = make_trainer(model, config, make_evaluator(config))
            trainer.check(train_rows(config), config.steps)  # before anything is shown of the run
            return asyncio.run(_train(trainer, config))
    finally:
        for number in EXIT_CODES:  # the outcome is decided: a signal must not change it while Python ends
            signal.signal(number, signal.SIG_IGN)


def make_supervisor(config: RunConfig) -> Supervisor:
    """The processes' owner for `config`. Raises ConfigError when its model can't be used."""
    make_chat = TASKS[config.task].chat_format if config.model == TINY_NAME else None
    return Supervisor(
        config.model,
        init=config.init,
        chat=make_chat() if make_chat is not None else None,
        template_options=parse_template_options(config.template_options),
        tool_format=config.tool_format,
        samplers=config.samplers,
        device=config.device,
        dtype=config.dtype,
        slots=config.slots,
        kv_gib=config.kv_gib,
    )


def make_trainer(model: Supervisor, config: RunConfig, evaluator: Evaluator | None = None) -> AsyncTrainer:
    """The trainer that `config` describes, on its task's environment."""
    task = TASKS[config.task]
    arguments = dict(task.arguments)
    if "latency" in task.options:
        arguments["latency"] = config.tool_latency
    options = {name: getattr(config.trainer, name) for name in config.trainer.__slots__ if name != "engine"}
    engine = config.trainer.engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)  # the same options were warned of when they were parsed
        return AsyncTrainer(
            engine=RolloutEngine(
                model,
                task.environment,
                env_arguments=arguments,
                **{name: getattr(engine, name) for name in engine.__slots__},
            ),
            run_dir=config.run_dir,
            evaluator=evaluator,
            **options,
        )


def make_evaluator(config: RunConfig) -> Evaluator | None:
    """On the task's held-out rows; None if `config` asks for no evaluation."""
    if config.eval_every is None:
        return None
    return Evaluator(
        TASKS[config.task].holdout_rows()[: config.eval_rows],
        every=config.eval_every,
        group_size=config.eval_group_size,
        final_group_size=config.eval_final_group_size,
    )


def train_rows(config: RunConfig) -> list[dict]:
    """The task's training rows for this run's seed."""
    return TASKS[config.task].train_rows(config.seed)


class Stoppable(Protocol):
    """A run that can end in order."""

    def request_stop(self) -> None: ...


class Signals:
    """The first SIGINT or SIGTERM asks the run to end in order, the second one ends it now."""

    def __init__(self, run: Stoppable) -> None:
        self.received: signal.Signals | None = None
        self._run = run
        self._task = asyncio.current_task()
        for number in EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            self._run.request_stop()
        else:
            self._task.cancel()


async def _train(trainer: AsyncTrainer, config: RunConfig) -> int:
    signals = Signals(trainer)
    progress = Progress(
        steps=config.steps,
        mode=config.mode,
        concurrency=config.trainer.engine.schedule.concurrency,
        waits_for=lambda: trainer.waits_for,
    )
    watching = asyncio.create_task(progress.watch())
    status = "failed"
    try:
        run = trainer.run(train_rows(config), config.steps, description=config.to_json())
        async with aclosing(run) as steps:  # a reader that goes away ends the run in order
            async for step in steps:
                progress.show(step.n, step.metrics)
        status = "stopped" if trainer.stopped else "completed"
    except asyncio.CancelledError:
        status = "stopped"
    finally:
        watching.cancel()
        latest = trainer.evaluations[-1] if trainer.evaluations else None
        progress.close(status, trainer.run_directory, latest, trainer.checkpoint)
    return 0 if status == "completed" else EXIT_CODES[signals.received]
