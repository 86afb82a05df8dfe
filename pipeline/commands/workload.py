"""From a WorkloadConfig to what rolls out: an environment, rows to train on, held-out rows, and how tiny speaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.chat.format import ChatFormat
from pipeline.commands.workload_config import WorkloadConfig
from pipeline.errors import ConfigError
from pipeline.tasks import TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All rows are in memory and checked; no process runs for it."""

    name: str  # how results call it
    env: str
    arguments: dict[str, Any]
    train_rows: Sequence[dict[str, Any]]
    holdout_rows: Sequence[dict[str, Any]]  # empty: none are held out

    def measured_rows(self, count: int | None, where: str) -> Sequence[dict[str, Any]]:
        """The first `count` held-out rows (None: all). Raises ConfigError, naming `where`, if there are fewer."""
        if count is not None and count > len(self.holdout_rows):
            raise ConfigError(
                f"{where} is {count}, but {self.name} has {len(self.holdout_rows)} held-out rows; lower it."
            )
        return self.holdout_rows[:count]


def open_workload(config: WorkloadConfig) -> Workload:
    """Raises ConfigError for what can't be rolled out."""
    task = TASKS[config.task]
    arguments = task.arguments_in(config.language)
    if "latency" in task.options:
        arguments["latency"] = config.tool_latency
    return Workload(
        name=task.name,
        env=task.environment,
        arguments=arguments,
        train_rows=task.train_rows(config.rows_seed),
        holdout_rows=task.holdout_rows(),
    )


def tiny_chat(config: WorkloadConfig) -> ChatFormat | None:
    """How the model tiny writes this workload; None: it can't."""
    make = TASKS[config.task].chat_format if config.task is not None else None
    return make() if make is not None else None
