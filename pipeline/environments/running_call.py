"""What a host keeps of each trajectory's environment, and of each call to it while it is under way."""

import asyncio
import inspect
import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from pipeline.env import Env, TrajectoryView
from pipeline.environments.call_time import CallTime
from workers.messages import EnvironmentCall, EnvironmentReply


class Refused(Exception):
    """A failure that is its own sentence: nothing was raised by user code."""


class Episode:
    """One environment with its view; `running` is the call that user code is in."""

    __slots__ = ("env", "key", "name", "row", "running", "view")

    def __init__(self, key: tuple[int, int], row: dict[str, Any], name: str) -> None:
        self.key = key  # group, member
        self.env: Env | None = None
        self.name = name  # the environment's, for messages
        self.row = row
        self.view: TrajectoryView | None = None
        self.running: RunningCall | None = None


class RunningCall:
    """One call from its arrival to its reply."""

    __slots__ = (
        "answer",
        "call",
        "episode",
        "expired",
        "interrupted_by",
        "method",
        "release",
        "started",
        "task",
        "time",
        "timer",
    )

    def __init__(self, call: EnvironmentCall, answer: Callable[[EnvironmentReply], None], time_of: CallTime) -> None:
        self.call = call
        self.time = time_of
        self.release: Callable[[], None] | None = None  # of its entry on the activity board, once it is abandoned
        self.answer: Callable[[EnvironmentReply], None] | None = answer  # None once the reply is out
        self.episode: Episode | None = None  # once the call has found or made it
        self.expired = False
        self.interrupted_by: str | None = None
        self.method = call.call
        self.started = time.perf_counter()
        self.task: asyncio.Task | None = None
        self.timer: asyncio.TimerHandle | None = None

    def enter(self, method: str) -> None:
        """This of the user's comes next."""
        self.method = method
        self.time.in_method(method)

    async def settle(self, value: Any) -> Any:
        """The value of a user's method, plain or a coroutine; `CancelledError` also if it ignored a cancellation."""
        if type(value) is CoroutineType or inspect.isawaitable(value):
            value = await value
            if self.expired or self.interrupted_by is not None:
                raise asyncio.CancelledError
        return value

    def reply(self, result: dict[str, Any], tools: list, error: str | None) -> None:
        if self.answer is not None:
            answer, self.answer = self.answer, None
            answer(EnvironmentReply(self.call.request, result, tools, time.perf_counter() - self.started, error))
