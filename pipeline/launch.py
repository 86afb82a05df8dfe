"""One run of the command line: from a checked RunConfig to an exit code."""

import asyncio
import signal

from pipeline.progress import Progress
from pipeline.rollouts import RolloutEngine
from pipeline.run_config import RunConfig
from pipeline.supervisor import Supervisor
from pipeline.tasks import TASKS
from pipeline.trainer import AsyncTrainer
from pipeline.trainer_config import TrainerConfig

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def run(config: RunConfig) -> int:
    """Train as `config` says, showing how it goes. Returns 0 when every step was trained, 130 or 143 after a signal."""
    task = TASKS[config.task]
    arguments = dict(task.arguments)
    if config.tool_latency != "none":
        arguments["latency"] = config.tool_latency
    chat = task.chat_format()
    with Supervisor(config.model, chat=chat, samplers=config.samplers, device=config.device) as model:
        trainer = make_trainer(model, task.environment, arguments, config.trainer, config.run_dir)
        return asyncio.run(_train(trainer, task.train_rows(config.seed), config))


def make_trainer(
    model: Supervisor, environment: str, arguments: dict, config: TrainerConfig, run_dir: str
) -> AsyncTrainer:
    """The trainer that `config` describes."""
    engine_options = {name: getattr(config.engine, name) for name in config.engine.__slots__}
    engine = RolloutEngine(model, environment, env_arguments=arguments, **engine_options)
    options = {name: getattr(config, name) for name in config.__slots__ if name != "engine"}
    return AsyncTrainer(engine=engine, run_dir=run_dir, **options)


class _Signals:
    """The first SIGINT or SIGTERM asks the run to end in order, the second one ends it now."""

    def __init__(self, trainer: AsyncTrainer) -> None:
        self.received: signal.Signals | None = None
        self._trainer = trainer
        self._task = asyncio.current_task()
        for number in EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            self._trainer.request_stop()
        else:
            self._task.cancel()


async def _train(trainer: AsyncTrainer, rows: list[dict], config: RunConfig) -> int:
    signals = _Signals(trainer)
    progress = Progress(steps=config.steps, mode=config.mode, waits_for=lambda: trainer.waits_for)
    status = "failed"
    try:
        async for step in trainer.run(rows, config.steps, description=config.to_json()):
            progress.show(step.n, step.metrics)
        status = "stopped" if trainer.stopped else "completed"
    except asyncio.CancelledError:
        status = "stopped"
    finally:
        progress.close(status, trainer.run_directory)
    return 0 if status == "completed" else EXIT_CODES[signals.received]
