"""How much of its time a call has used, and whose code runs now.

User code of many trajectories shares one event loop, and a plain method holds it. So a call's time runs from its first
step, and what others hold the loop for meanwhile is not counted: twenty plain rewards of five seconds each, one after
the other, took five seconds each. To know that, every step of every task that a call starts is noted, as it begins and
as it ends; tools in threads are noted for as long as they run, also when nobody waits for them any more.
"""

import asyncio
import contextvars
import functools
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.environments.activity import METHODS, ActivityBoard, now_ns

BEAT_SECONDS = 0.5  # between two signs of life of a loop that has nothing to do

_METHOD_NUMBERS = {name: number for number, name in enumerate(METHODS)}


class LoopTime:
    """The steps of one event loop, on its thread. Times are nanoseconds."""

    def __init__(self, board: ActivityBoard) -> None:
        self.board = board
        self.held_ns = 0  # by steps that are over, of all calls together
        self.num_calls = 0  # under way
        self._entered_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on the loop beats, and tells whose steps it runs. Idempotent."""
        if self._timer is None:
            loop.set_task_factory(_make_task)
            loop.set_default_executor(_NotingExecutor(thread_name_prefix="headway-to-thread"))
            self._beat(loop)

    def detach(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def enter(self, call: "CallTime") -> None:
        self._entered_ns = now = now_ns()
        if call.began_ns is None:
            call.began_ns, call.held_before_ns = now, self.held_ns
        self.board.enter_loop(call.request, now - call.used_ns(now), call.method)

    def leave(self, call: "CallTime") -> None:
        end_alarm()
        spent = now_ns() - self._entered_ns
        self.held_ns += spent
        call.own_ns += spent
        self.board.leave_loop(self.num_calls > 0)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.board.leave_loop(self.num_calls > 0)
        self._timer = loop.call_later(BEAT_SECONDS, self._beat, loop)


def end_alarm() -> None:
    """No alarm that a step has set outlives it: it would go off in the loop, or in another trajectory's code."""
    if threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


class CallTime:
    """One call's account."""

    __slots__ = ("_loop_time", "began_ns", "held_before_ns", "method", "own_ns", "request")

    def __init__(self, loop_time: LoopTime, request: int) -> None:
        self._loop_time = loop_time
        self.request = request
        self.method = 0
        self.began_ns: int | None = None
        self.held_before_ns = 0
        self.own_ns = 0

    def in_method(self, name: str) -> None:
        """What of the user's it is in, from now on; called in a step of its own."""
        self.method = _METHOD_NUMBERS.get(name, 0)
        self._loop_time.board.in_method(self.method)

    def used_ns(self, now: int | None = None) -> int:
        """0 before its first step."""
        if self.began_ns is None:
            return 0
        held_by_others = self._loop_time.held_ns - self.held_before_ns - self.own_ns
        return (now_ns() if now is None else now) - self.began_ns - held_by_others

    def enter(self) -> None:
        self._loop_time.enter(self)

    def leave(self) -> None:
        self._loop_time.leave(self)

    def stays(self, thread: int = 0) -> Callable[[], None]:
        """It goes on beside the loop, until the function that this returns is called."""
        now = now_ns()
        return self._loop_time.board.claim(self.request, now - self.used_ns(now), self.method, thread)

    def in_thread(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run the function, in a thread beside the loop."""
        release = self.stays(threading.get_native_id())
        try:
            return function(*args, **options)
        finally:
            release()


CALL: contextvars.ContextVar[CallTime | None] = contextvars.ContextVar("headway_call", default=None)


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for a thread: it is noted as part of the call that asks for it."""
    call = CALL.get()
    return function if call is None else functools.partial(call.in_thread, function)


class _Stepped(Coroutine):
    """A coroutine whose steps are noted; everything else of it is its own."""

    __slots__ = ("_call", "_coroutine")

    def __init__(self, coroutine: Coroutine, call: CallTime) -> None:
        self._coroutine = coroutine
        self._call = call

    def send(self, value: Any) -> Any:
        self._call.enter()
        try:
            return self._coroutine.send(value)
        finally:
            self._call.leave()

    def throw(self, *error: Any) -> Any:
        self._call.enter()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._call.leave()

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task:
    """The loop's task factory."""
    context = options.get("context")
    call = CALL.get() if context is None else context.get(CALL)
    return asyncio.Task(coroutine if call is None else _Stepped(coroutine, call), loop=loop, **options)


class _NotingExecutor(ThreadPoolExecutor):
    """For `asyncio.to_thread` in users' code."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return super().submit(noted(function), *args, **options)
