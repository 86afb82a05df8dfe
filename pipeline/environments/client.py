"""The supervisor's end of the environments: calls out, replies in, one future per call.

A host is an environment process, or the thread that stands in for one when the class can't be imported there. A
trajectory's environment stays with one host from reset to its end.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pipeline.errors import RunError, TrajectoryError
from workers.message_codec import encode
from workers.messages import EnvironmentCall, EnvironmentReplies, EnvironmentReply, Environments, Message

# What of a user's a call may be in: the host alone knows which, and one that hangs can't tell.
METHODS = {"reset": "reset", "turn": "on_turn or reward", "truncate": "on_truncated", "drop": "close"}


class Dropped(Exception):
    """The environment was dropped while a call of it was under way."""


class EnvironmentHandle:
    """One trajectory's environment: `call` until a reply holds a reward, or `drop`."""

    def __init__(self, client: "EnvironmentClient", host: int, group: int, member: int) -> None:
        self._client = client
        self._host = host
        self._group = group
        self._member = member
        self._open = True
        self._pending: tuple[str, asyncio.Future[EnvironmentReply]] | None = None  # the call under way
        self._truncation: asyncio.Future[EnvironmentReply] | None = None  # by which `interrupt` ends a turn
        client.num_open[host] += 1

    async def call(self, call: str, argument: dict[str, Any]) -> EnvironmentReply:
        """reset, turn or truncate (see `EnvironmentCall`). Raises TrajectoryError with the host's sentence if it
        failed, and Dropped.

        The reply of a turn that was interrupted is that of its truncation, unless the turn had its answer first.
        """
        future = self._client.send(self._host, self._group, self._member, call, argument)
        self._pending = (call, future)
        reply = await future
        if self._truncation is not None and "reward" not in reply.result:
            self._pending = ("truncate", self._truncation)
            truncated = await self._truncation
            if truncated.error is not None and reply.error is not None:  # whichever of the two says why
                truncated = truncated._replace(error=f"{reply.error}; {truncated.error}")
            reply = truncated
        self._pending = None
        if reply.error is not None:
            self._close()
            raise TrajectoryError(reply.error)
        if "reward" in reply.result:
            self._close()
        return reply

    def interrupt(self, cause: str) -> None:
        """End a turn that is under way by a truncation with `cause`; any other call goes on."""
        if self._pending is not None and self._pending[0] == "turn" and not self._pending[1].done():
            self._truncation = self._client.send(self._host, self._group, self._member, "truncate", {"cause": cause})

    def drop(self) -> None:
        """Close it without a reward, and end a call that is under way; does nothing when it is closed already."""
        if self._pending is not None and not self._pending[1].done():
            self._pending[1].set_exception(Dropped())
        if self._open:
            self._close()
            self._client.send(self._host, self._group, self._member, "drop", {}).add_done_callback(_ignore)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._client.num_open[self._host] -= 1


def _ignore(future: asyncio.Future) -> None:
    """A drop's reply says nothing, and at the end of a run it may never come."""
    if not future.cancelled():
        future.exception()


class EnvironmentClient:
    """Calls to all hosts; what is asked in one tick of the loop goes out to a host in one message."""

    def __init__(self, senders: list[Callable[[Message], None]], on_error: Callable[[Exception], None]) -> None:
        """on_error gets what goes wrong where nobody waits."""
        self.num_open = [0] * len(senders)
        self._senders = senders
        self._on_error = on_error
        self._numbers = 0
        self._outgoing: list[list[EnvironmentCall]] = [[] for _ in senders]
        # request -> future, call, when it was made, host
        self._pending: dict[int, tuple[asyncio.Future[EnvironmentReply], EnvironmentCall, float, int]] = {}
        self._flush_due = False
        self._failure: Exception | None = None

    def open(self, group: int, member: int) -> EnvironmentHandle:
        """An environment on the host that has the fewest."""
        host = min(range(len(self._senders)), key=self.num_open.__getitem__)
        return EnvironmentHandle(self, host, group, member)

    def send(self, host: int, group: int, member: int, call: str, argument: dict[str, Any]) -> asyncio.Future:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._numbers += 1
        record = EnvironmentCall(self._numbers, group, member, call, argument)
        self._pending[record.request] = (future, record, time.monotonic(), host)
        self._outgoing[host].append(record)
        if not self._flush_due:
            self._flush_due = True
            loop.call_soon(self._flush)
        return future

    def receive(self, message: Message) -> None:
        """A message of a host; ignored once the run has failed."""
        if isinstance(message, EnvironmentReplies) and self._failure is None:
            for reply in message.replies:
                future, *_ = self._pending.pop(reply.request)
                if not future.done():
                    future.set_result(reply)

    def overdue(self, seconds: float) -> tuple[int, str] | None:
        """The oldest call that has been out for more than `seconds`: its host, and the call in words."""
        for _, record, since, host in self._pending.values():
            age = time.monotonic() - since
            if age <= seconds:
                return None  # calls are kept in the order they were made
            return host, f"{_name(record)} has not come back for {age:.0f} s"
        return None

    def fail(self, error: Exception) -> None:
        """The run is over: whoever waits gets `error`."""
        self._failure = error
        for future, *_ in self._pending.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: a drop has no waiter
        self._pending.clear()

    def _flush(self) -> None:
        self._flush_due = False
        outgoing, self._outgoing = self._outgoing, [[] for _ in self._senders]
        for host, calls in enumerate(outgoing):
            if calls and self._failure is None:
                try:
                    self._senders[host](Environments(calls=calls))
                except (TypeError, ValueError, OverflowError) as error:  # msgpack's, for what is no plain value
                    names = ", ".join(map(_name, filter(_is_unencodable, calls)))
                    self._on_error(
                        RunError(f"What the environment is told can't be sent ({names}): {error}; use plain values.")
                    )


def _name(call: EnvironmentCall) -> str:
    return f"{METHODS[call.call]} of trajectory {call.group}.{call.member}"


def _is_unencodable(call: EnvironmentCall) -> bool:
    try:
        encode(Environments(calls=[call]), 0)
    except (TypeError, ValueError, OverflowError):
        return True
    return False
