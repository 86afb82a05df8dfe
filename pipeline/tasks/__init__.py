"""Built-in tasks by name: an environment, its rows, and how the tiny model writes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat.format import ChatFormat
from pipeline.tasks import arithmetic, calculator, guess, search, search_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One built-in task. `arguments` are the environment's; `options` are those that a user may set.

    `speaks` says for whom it is written: "tiny" (the model of that name), "text" (models with a chat template), or
    both; the environment of such a task takes a `language`. Rows are the same in both. `budget` holds, by language, the
    fields of `Budget` in which the task differs from its defaults.
    """

    name: str
    environment: str  # "module:Class"
    speaks: tuple[str, ...]
    chat_format: Callable[[], ChatFormat] | None = None  # of model="tiny"
    train_rows: Callable[[int], list[dict[str, Any]]]  # by seed
    holdout_rows: Callable[[], list[dict[str, Any]]]
    options: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def arguments_in(self, language: str) -> dict[str, Any]:
        """The environment's arguments for a model of that language, one of those that the task speaks."""
        return dict(self.arguments) | ({"language": language} if len(self.speaks) > 1 else {})


LATENCY = "how long the tool takes: none, fixed:MS or lognormal:MEDIAN_MS:SIGMA"

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="guess",
            environment=f"{guess.__name__}:{guess.Guess.__qualname__}",
            speaks=("tiny",),
            chat_format=guess.chat_format,
            train_rows=guess.train_rows,
            holdout_rows=guess.holdout_rows,
            options={"latency": LATENCY},
            budget={"tiny": {"max_turn_tokens": guess.MAX_TURN_TOKENS, "max_context_tokens": guess.MAX_CONTEXT_TOKENS}},
        ),
        Task(
            name="calculator",
            environment=f"{calculator.__name__}:{calculator.Calculator.__qualname__}",
            speaks=("text",),
            train_rows=calculator.train_rows,
            holdout_rows=calculator.holdout_rows,
            options={"latency": LATENCY},
            budget={
                "text": {
                    "max_turns": calculator.MAX_TURNS,
                    "max_turn_tokens": calculator.MAX_TURN_TOKENS,
                    "max_context_tokens": calculator.MAX_CONTEXT_TOKENS,
                    "tool_output_tokens": calculator.TOOL_OUTPUT_TOKENS,
                }
            },
        ),
        Task(
            name="arithmetic",
            environment=f"{arithmetic.__name__}:{arithmetic.Arithmetic.__qualname__}",
            speaks=("tiny", "text"),
            chat_format=arithmetic.chat_format,
            train_rows=arithmetic.train_rows,
            holdout_rows=arithmetic.holdout_rows,
            budget={"tiny": arithmetic.TINY_BUDGET, "text": arithmetic.TEXT_BUDGET},
        ),
        Task(
            name="search",
            environment=f"{search.__name__}:{search.Search.__qualname__}",
            speaks=("tiny", "text"),
            chat_format=search.chat_format,
            train_rows=search_world.train_rows,
            holdout_rows=search_world.holdout_rows,
            options={"latency": LATENCY},
            budget={"tiny": search.TINY_BUDGET, "text": search.TEXT_BUDGET},
        ),
    )
}
