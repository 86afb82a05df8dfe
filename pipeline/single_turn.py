"""SingleTurn: rows with a prompt, one turn of the model, and a function of yours that says what it is worth."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pipeline.config_checks import check_parameters
from pipeline.env import ChatMessage, Env, TrajectoryView, TurnResult, as_messages, is_empty_prompt
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.named import find_named
from pipeline.wording import shown, suggestion

# reward(text of the turn, row) -> a finite number of any kind
Reward = Callable[[str, dict[str, Any]], float | Awaitable[float]]


class SingleTurn(Env):
    """The environment of data with a reward function: no tools, one turn.

    reward: `reward(text, row)`, plain or `async`, or its path `module:function` or `path/to/file.py:function`. It gets
    the text of the model's turn and the whole row, and gives a finite number; anything else fails the trajectory.
    prompt_field: the row's entry that is the prompt, text or a list of messages. system_prompt: goes before it, unless
    the messages begin with one of their own. allow_empty_prompts: rows whose prompt is empty are no mistake. What the
    budget cuts short is worth 0, as in any `Env`. Raises ConfigError
    or ConfigTypeError.
    """

    recovery = "stateless"  # whoever scores the turn needs nothing of its reset

    def __init__(
        self,
        reward: Reward | str,
        *,
        prompt_field: str = "prompt",
        system_prompt: str | None = None,
        allow_empty_prompts: bool = False,
    ) -> None:
        self._reward = _load(reward) if isinstance(reward, str) else check_reward(reward, shown(reward))
        if not isinstance(prompt_field, str) or not prompt_field:
            raise ConfigTypeError(f"SingleTurn.prompt_field is {shown(prompt_field)}; it names an entry of the rows.")
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise ConfigTypeError(f"SingleTurn.system_prompt is {shown(system_prompt)}; it is a text.")
        if not isinstance(allow_empty_prompts, bool):
            raise ConfigTypeError(
                f"SingleTurn.allow_empty_prompts is {shown(allow_empty_prompts)}; it is True or False."
            )
        self._prompt_field = prompt_field
        self._system_prompt = system_prompt
        self._allow_empty_prompts = allow_empty_prompts

    def reset(self, row: dict[str, Any]) -> Sequence[ChatMessage]:
        messages = prompt_of(row, self._prompt_field, "The row", allow_empty=self._allow_empty_prompts)
        if self._system_prompt is None or (messages and messages[0]["role"] == "system"):
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def on_turn(self, traj: TrajectoryView) -> TurnResult | None:
        """The end, also where the model wrote what reads as a tool call."""
        return None

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float | Awaitable[float]:
        return self._reward(traj.text, row)


def prompt_of(row: Mapping[str, Any], prompt_field: str, what: str, *, allow_empty: bool) -> list[ChatMessage]:
    """The row's prompt as messages; ConfigError or ConfigTypeError, which begin with `what`, if it has none, or an
    empty one that isn't allowed.
    """
    if prompt_field not in row:
        near = suggestion(prompt_field, filter(lambda key: isinstance(key, str), row))
        raise ConfigError(
            f"{what} has no {prompt_field!r}, only {', '.join(map(repr, row)) or 'nothing'}; SingleTurn.prompt_field "
            f"names the entry that is the prompt.{near}"
        )
    messages = as_messages(row[prompt_field], f"{what}, as its {prompt_field!r},")
    if not allow_empty and is_empty_prompt(messages):
        raise ConfigError(
            f"{what} has an empty prompt ({prompt_field!r} is {row[prompt_field]!r:.60}). Write the prompt, or say "
            "with allow_empty_prompts that it may be empty."
        )
    return messages


def check_reward(reward: Any, name: str) -> Reward:
    """`reward`, if it can be called with a text and a row; ConfigTypeError otherwise."""
    if not callable(reward):
        raise ConfigTypeError(
            f"The reward {name} is {type(reward).__name__}; it must be a function reward(text, row) that gives a "
            "number."
        )
    call = "reward(text, row), with the text of the turn and the dataset row"
    check_parameters(reward, 2, f"The reward {name}", call)
    return reward


@functools.cache
def _load(path: str) -> Reward:
    """The function at `path`, once per process."""
    found = find_named(path, "reward", "my_rewards:exact")
    return check_reward(found, path)
