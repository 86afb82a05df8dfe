"""Built-in tasks by name: an environment, its rows, and how the tiny model writes them."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import ConfigError
from pipeline.rendering import ChatFormat
from pipeline.tasks import guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One built-in task. `arguments` are the environment's; `options` are those that a user may set.

    `budget` holds the fields of `Budget` in which the task differs from its defaults.
    """

    name: str
    summary: str
    environment: str  # "module:Class"
    chat_format: Callable[[], ChatFormat]  # of model="tiny"
    train_rows: Callable[[int], list[dict[str, Any]]]  # by seed
    holdout_rows: Callable[[], list[dict[str, Any]]]
    options: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="guess",
            summary=f"find a number from 1 to {guess.NUM_NUMBERS} in {guess.NUM_GUESSES} guesses",
            environment=f"{guess.__name__}:{guess.Guess.__qualname__}",
            chat_format=guess.chat_format,
            train_rows=guess.train_rows,
            holdout_rows=guess.holdout_rows,
            options={"latency": "how long the tool takes: none, fixed:MS or lognormal:MEDIAN_MS:SIGMA"},
            budget={"max_turn_tokens": guess.MAX_TURN_TOKENS},
        ),
    )
}


def task_named(name: str) -> Task:
    """The task; `ConfigError` naming the nearest one if there is none of that name."""
    task = TASKS.get(name)
    if task is None:
        nearest = difflib.get_close_matches(name, TASKS, n=1)
        advice = f"Did you mean {nearest[0]}?" if nearest else "Choose one of these."
        raise ConfigError(f"There is no task {name!r}. The built-in tasks are {', '.join(TASKS)}. {advice}")
    return task
