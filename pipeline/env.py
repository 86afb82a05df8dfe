"""What users write: an `Env` says how a conversation starts, what follows a turn of the model, and what it is worth.

    class Search(rl.Env):
        @rl.tool
        async def search(self, query: str) -> str:
            '''Search the library.'''

        def reset(self, row):
            return row["question"]

        def reward(self, traj, row):
            return float(row["answer"] in traj.text)

One instance serves one trajectory, from `reset` to `close`, in one environment process. Each method may be plain or
`async`. Coroutines share the process's event loop; plain methods run on its main thread and hold up the other
trajectories there, so let waiting be `async` (plain *tools* run in threads). This file and its process load no torch.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat.call_json import CallError, read_call_arguments
from pipeline.chat.format import ChatMessage
from pipeline.config_checks import MAX_COUNT, check_parameters
from pipeline.dataset import why_not_plain
from pipeline.environments.tool_calls import run_tool_call
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.gather import gather_all
from pipeline.user_code.tools import tool, tools_of
from pipeline.wording import shown
from workers.messages import ToolRecord

__all__ = ["Env", "ToolCall", "TrajectoryView", "Turn", "TurnResult", "as_messages", "check_env_class", "tool"]

ROLES = ("system", "user", "assistant", "tool")
RECOVERIES = ("drop", "stateless", "snapshot")
_CALLED_WITH = {
    "reset": ("row",),
    "on_turn": ("traj",),
    "reward": ("traj", "row"),
    "on_truncated": ("traj", "row", "cause"),
}
WRAP_UP = "Little room is left. Give your final answer now, without calling tools."


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made in a turn. `error` says why it could not be read; it is then not executed. `id` is
    its own within the trajectory; the message with its result names it.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model. `stopped` is False when the turn was cut at its token cap."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    num_tokens: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What follows a turn: messages for the model, and optionally a cap on its next turn.

    `metrics` are summed over the trajectories of a batch into `rollout/<name>`. `TurnResult(done=True, metrics=...)`
    ends the episode as returning None does, and still delivers the metrics.
    """

    messages: Sequence[ChatMessage] | str = ()
    max_turn_tokens: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool = False

    def __post_init__(self) -> None:
        if self.messages is None:
            raise ConfigTypeError(
                "TurnResult.messages is None. It holds what the model reads next. To end the episode, return None "
                "instead of a TurnResult, or TurnResult(done=True, metrics=...) to deliver metrics."
            )
        if not isinstance(self.done, bool):
            raise ConfigTypeError(f"TurnResult.done is {self.done!r}. It says whether the episode ends: True or False.")
        if self.done and (self.messages or self.max_turn_tokens is not None):
            raise ConfigError(
                "TurnResult has done=True, so no turn follows that messages or max_turn_tokens could count for. "
                "Leave them out, or leave out done."
            )
        cap = self.max_turn_tokens
        if cap is not None and (type(cap) is not int or not 1 <= cap <= MAX_COUNT):
            raise ConfigError(
                f"TurnResult.max_turn_tokens is {shown(cap)}. It counts the tokens of the next turn, so it is an "
                f"integer from 1 to {MAX_COUNT:,}. Leave it out for no cap."
            )


class TrajectoryView:
    """What user code sees of its trajectory so far.

    `loss_mask_end` may be set in `on_turn`, `reward` and `on_truncated`: of the tokens that the trajectory generates,
    in all its turns, only the first so many are trained; `traj.num_generated_tokens` there keeps all up to now, and
    none from now on.
    """

    __slots__ = (
        "group",
        "in_turn",
        "loss_mask_end",
        "max_tool_chars",
        "member",
        "messages",
        "rewritten",
        "running_tools",
        "tool_records",
        "turns",
    )

    def __init__(self, group: int, member: int, messages: list[ChatMessage]) -> None:
        self.group = group
        self.member = member
        self.messages = messages  # all so far, the model's turns among them
        self.loss_mask_end: int | None = None
        self.max_tool_chars: int | None = None  # what is longer in a tool's result is cut
        self.in_turn = False  # on_turn runs
        self.rewritten = False  # in this turn
        self.turns: list[Turn] = []
        self.tool_records: list[ToolRecord] = []  # of the turn being answered
        self.running_tools: list[str] = []

    @property
    def last_turn(self) -> Turn | None:
        return self.turns[-1] if self.turns else None

    @property
    def text(self) -> str:
        """The text of the last turn; empty before the first one."""
        return self.turns[-1].text if self.turns else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the last turn, in the model's order."""
        return self.turns[-1].tool_calls if self.turns else ()

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_generated_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    def rewrite(self, messages: Sequence[ChatMessage] | str) -> None:
        """In `on_turn`: the model goes on from these messages in place of all so far, as from a new prompt.

        What was generated before is still trained, given what it was generated from. The messages of the TurnResult
        follow. Raises ConfigError outside `on_turn`.
        """
        if not self.in_turn:
            raise ConfigError(
                "traj.rewrite was called outside on_turn. It replaces what the model's next turn goes on from, which "
                "is decided there. Call it in on_turn."
            )
        self.messages = as_messages(messages, "traj.rewrite")
        self.rewritten = True


class Env:
    """Base of all environments; `reset` and `reward` must be written.

    What `reset`, `on_turn` or `reward` raises fails the trajectory, and what follows is `AsyncTrainer(on_failure=...)`;
    it never becomes a reward.

    When an instance is lost with its process (something else there crashed it, or hung), `recovery` says what follows:

    - "drop": the trajectory starts again, from `reset`; what it generated so far is thrown away.
    - "stateless": it goes on with its tokens and a new instance, whose `reset` is not called: all that tools, `on_turn`
      and `reward` need must be in the view, the row and `__init__`.
    - "snapshot": the same, and the new instance gets the last `snapshot` by `restore`. It is taken after `reset` and
      after each turn.

    Either way a call that was under way is made again; `rng` is seeded as at first.
    """

    tools: Sequence[Callable] | None = None  # None: all @tool methods; a list (also set in `reset`): exactly these
    wrap_up: Sequence[ChatMessage] | str = WRAP_UP  # asks for the final answer (`Budget.final_answer_reserve`)
    recovery: str = "drop"  # what becomes of an unfinished trajectory whose process is gone, see above
    rng: random.Random  # seeded per trajectory before `reset`: use it for all that is random, to be reproducible

    @classmethod
    def rows(cls, seed: int, /, **arguments: Any) -> Iterable[dict[str, Any]] | None:
        """The rows that the environment brings along, plain values; `arguments` are those that instances are made with.
        None: rows come from data. It is asked once, before the run, in a process of its own.
        """
        return None

    def reset(self, row: dict[str, Any]) -> Sequence[ChatMessage] | str:
        """The first messages (a string: one user message) for a dataset row."""
        raise NotImplementedError(f"{type(self).__qualname__} has no reset(row)")

    async def on_turn(self, traj: TrajectoryView) -> TurnResult | None:
        """What follows the model's turn; None ends the episode. Runs the turn's tool calls unless overridden."""
        if not traj.tool_calls:
            return None
        return TurnResult(messages=await self.call_tools(traj))

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float:
        """The finished episode's reward, a finite number."""
        raise NotImplementedError(f"{type(self).__qualname__} has no reward(traj, row)")

    def on_truncated(self, traj: TrajectoryView, row: dict[str, Any], cause: str) -> float:
        """The reward of an episode that a limit ended; `cause` is `turns`, `generated_tokens`, `context`, …"""
        return 0.0

    def close(self) -> None:
        """Free what `reset` took; called once, after the reward or when the trajectory is given up, also when a method
        has raised. Only the end of its process leaves it out.
        """

    def snapshot(self) -> dict[str, Any]:
        """Plain values (at most 1 MiB) from which `restore` goes on; needed for `recovery = "snapshot"`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no snapshot()")

    def restore(self, state: dict[str, Any]) -> None:
        """Go on, as a new instance, from what `snapshot` gave."""
        raise NotImplementedError(f"{type(self).__qualname__} has no restore(state)")

    async def call_tools(self, traj: TrajectoryView) -> list[ChatMessage]:
        """Run the last turn's tool calls, several in parallel, and return their tool messages in call order."""
        calls = traj.tool_calls
        if len(calls) == 1:  # no task: this is every turn's path
            texts = [await run_tool_call(self, traj, calls[0])]
        else:
            texts = await gather_all(*(run_tool_call(self, traj, call) for call in calls))
        return [
            cut_tool_message(_tool_message(call, text), traj.max_tool_chars)
            for call, text in zip(calls, texts, strict=True)
        ]


def _tool_message(call: ToolCall, text: str) -> ChatMessage:
    identity = {"tool_call_id": call.id} if call.id else {}  # a call that a user has made has none
    return {"role": "tool", "name": call.name, **identity, "content": text}


def cut_tool_message(message: ChatMessage, max_chars: int | None) -> ChatMessage:
    """A tool's message with no more characters than that (None: any number), and marked if it had more; any other
    message as it is.
    """
    if max_chars is None or message["role"] != "tool" or len(message["content"]) <= max_chars:
        return message
    return message | {"content": message["content"][:max_chars], "cut": True}


def as_messages(value: Any, source: str) -> list[ChatMessage]:
    """Checked messages from what user code gave; `source` names it in the `ConfigTypeError`."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)):
        raise ConfigTypeError(
            f"{source} gave {type(value).__name__}. It gives a string (one user message) or a list of "
            '{"role": ..., "content": ...}. Return one of these.'
        )
    for message in value:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise ConfigTypeError(
                f"{source} gave the message {shown(message)}. A message is a dict with a role, one of "
                f"{', '.join(ROLES)}, and a string as content. Correct it."
            )
        if message.get("tool_calls") is not None and not all(map(_is_call, _list_of(message["tool_calls"]))):
            raise ConfigTypeError(
                f"{source} gave the message {shown(message)}. Its tool_calls are a list of calls, each "
                '{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}. Correct them.'
            )
        why = why_not_plain(message)
        if why is not None:
            raise ConfigTypeError(
                f"{source} gave the message {shown(message)}, which can't be sent ({why}). A message travels to "
                "another process, so it holds plain values only. Correct it."
            )
    return list(value)


def is_empty_prompt(prompt: str | list[ChatMessage]) -> bool:
    """Whether a text, or a list of messages, says nothing at all."""
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any(message["content"].strip() or message.get("tool_calls") for message in prompt)


def _list_of(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _is_call(call: Any) -> bool:
    """Whether it is a tool call as chat templates take it; its arguments may be the JSON text of an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    try:
        read_call_arguments(function.get("arguments"), "")
    except CallError:
        return False
    return True


def check_env_class(env_class: Any, path: str | None = None) -> None:
    """Raise `ConfigTypeError` unless this is an `Env` class with all that a run needs; its tools are checked too.
    path: what it was found by, for the message.
    """
    if not (isinstance(env_class, type) and issubclass(env_class, Env)):
        named = f" {path!r:.200}" if path is not None else ""
        raise ConfigTypeError(
            f"The environment{named} is {shown(env_class)}. It must be a class derived from Env. Name such a class."
        )
    name = env_class.__qualname__
    for method in ("reset", "reward"):
        if getattr(env_class, method) is getattr(Env, method):
            raise ConfigTypeError(
                f"{name} has no {method}(). Every Env writes reset and reward. Add {method} to {name}."
            )
    blank = env_class.__new__(env_class)
    for method, parameters in _CALLED_WITH.items():
        call = f"{method}({', '.join(parameters)})"
        check_parameters(getattr(blank, method), len(parameters), f"{name}.{method}", call)
    check_recovery(env_class.recovery, name)
    if env_class.recovery == "snapshot":
        for method in ("snapshot", "restore"):
            if getattr(env_class, method) is getattr(Env, method):
                raise ConfigTypeError(
                    f'{name}.recovery is "snapshot", but {name} has no {method}(). Write snapshot and restore, or '
                    "choose another recovery."
                )
    if isinstance(env_class.tools, (list, tuple)) or env_class.tools is None:
        tools_of(blank)


def check_recovery(recovery: Any, name: str) -> str:
    """`recovery` of the environment class `name`. Raises ConfigTypeError unless it is one that there is."""
    if recovery not in RECOVERIES:
        raise ConfigTypeError(
            f"{name}.recovery is {recovery!r:.80}. It must be one of {', '.join(RECOVERIES)}. Choose one."
        )
    return recovery
