"""The supervisor's end of the environments: calls out, replies in, one future per call.

A host is an environment process, or the thread that stands in for one when the class can't be imported there. A
trajectory's environment stays with one host from reset to its end, unless that host is lost: its process was killed or
died, and another one takes its place (`lost`, then `back`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pipeline.errors import HopelessError, RunError, TookTooLongError, TrajectoryError
from pipeline.processes.environment.environment_handle import EnvironmentHandle, EnvironmentLost
from workers.message_codec import encode
from workers.messages import EnvironmentCall, EnvironmentReplies, EnvironmentReply, Environments, Message

# What of a user's a call may be in: the host alone knows which.
METHODS = {
    "reset": "reset",
    "restore": "restore",
    "turn": "on_turn or reward",
    "truncate": "on_truncated",
    "drop": "close",
}
MAX_DEATHS = 3  # of environment processes while a group's members were in user code there: the next one is no accident


class EnvironmentClient:
    """Calls to all hosts; what is asked in one tick of the loop goes out to a host in one message."""

    def __init__(
        self,
        senders: list[Callable[[Message], None]],
        on_error: Callable[[Exception], None],
        stands_still: Callable[[int], bool] = lambda host: False,
    ) -> None:
        """on_error gets what goes wrong where nobody waits. stands_still(host): it is there, but does not get on."""
        self.open_at: list[set[EnvironmentHandle]] = [set() for _ in senders]
        self._senders = senders
        self._on_error = on_error
        self._stands_still = stands_still
        self._up = [True for _ in senders]
        self._numbers = 0
        self._outgoing: list[list[EnvironmentCall]] = [[] for _ in senders]
        # request -> future, call, when it was made, host
        self._pending: dict[int, tuple[asyncio.Future[EnvironmentReply], EnvironmentCall, float, int]] = {}
        self._deaths: Counter[int] = Counter()  # by group: those in which it was in user code
        self._flush_due = False
        self._failure: Exception | None = None

    def open(self, group: int, member: int) -> EnvironmentHandle:
        """An environment of that trajectory's own, on a host from its first call on."""
        return EnvironmentHandle(self, group, member)

    def state(self) -> list[dict[str, Any]]:
        """For a report, host by host: how many environments it has, and the calls that are out."""
        now = time.monotonic()
        calls: list[list[str]] = [[] for _ in self._senders]
        for _, record, since, host in self._pending.values():
            calls[host].append(f"{name_of(record)}, for {now - since:.0f} s")
        return [
            {"up": self._up[host], "environments": len(self.open_at[host]), "calls": calls[host]}
            for host in range(len(self._senders))
        ]

    def is_up(self, host: int) -> bool:
        """Whether its process is there."""
        return self._up[host]

    def choose(self) -> int:
        """The host that has the fewest environments, among those that are there and get on, or else that are there."""

        def order(host: int) -> tuple[bool, bool, int]:
            return not self._up[host], self._stands_still(host), len(self.open_at[host])

        return min(range(len(self._senders)), key=order)

    def send(self, host: int, group: int, member: int, call: str, argument: dict[str, Any]) -> asyncio.Future:
        """Ask; a host that is being replaced is asked when it is back."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._numbers += 1
        record = EnvironmentCall(self._numbers, group, member, call, argument)
        self._pending[record.request] = (future, record, time.monotonic(), host)
        self._outgoing[host].append(record)
        self._flush_soon()
        return future

    def receive(self, message: Message) -> None:
        """A message of a host; ignored once the run has failed."""
        if isinstance(message, EnvironmentReplies) and self._failure is None:
            for reply in message.replies:
                future, *_ = self._pending.pop(reply.request)
                if not future.done():
                    future.set_result(reply)

    def lost(self, host: int, why: str, failed: Mapping[int, str], suspects: Collection[int] = ()) -> None:
        """The host's process is gone, in one sentence `why`, and with it all its environments.

        failed: what trajectories fail with, by request. suspects: requests that may have been its death; a group that
        was in user code at MAX_DEATHS deaths fails at those. All others are told to start again (EnvironmentLost).
        """
        self._up[host] = False
        self._outgoing[host].clear()
        errors: dict[int, TrajectoryError] = {}
        errors |= {request: TookTooLongError(sentence) for request, sentence in failed.items()}
        errors |= self._condemned(suspects, why)
        for request, (future, _, _, at) in list(self._pending.items()):
            if at != host:
                continue
            del self._pending[request]
            if not future.done():
                future.set_exception(errors[request] if request in errors else EnvironmentLost(why))
                future.exception()  # seen: a drop or an interruption has no waiter
        handles, self.open_at[host] = self.open_at[host], set()
        for handle in handles:
            handle.note_lost(why)

    def back(self, host: int) -> None:
        """Another process is there, without any environment yet."""
        self._up[host] = True
        self._flush_soon()

    def forget(self, group: int) -> None:
        """The group has ended: no death counts against it any more."""
        self._deaths.pop(group, None)

    def call_of(self, request: int) -> EnvironmentCall | None:
        """The call that is out under this number."""
        return self._pending[request][1] if request in self._pending else None

    def overdue(self, seconds: float) -> str | None:
        """A call that has been out for longer than its host may take for all that is out there, `seconds` for each, in
        words: no host's user code explains that.
        """
        waiting = Counter(host for *_, host in self._pending.values())
        for _, record, since, host in self._pending.values():
            age = time.monotonic() - since
            if age <= seconds:
                return None  # calls are kept in the order they were made
            if self._up[host] and age > seconds * (1 + waiting[host]):
                return f"{name_of(record)} has not come back for {age:.0f} s"
        return None

    def fail(self, error: Exception) -> None:
        """The run is over: whoever waits gets `error`."""
        self._failure = error
        for future, *_ in self._pending.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: a drop has no waiter
        self._pending.clear()

    def _condemned(self, suspects: Collection[int], why: str) -> dict[int, HopelessError]:
        """Count the death for the groups of the suspects; the errors of those for whom it was one too many: they have
        started again often enough.
        """
        calls = [call for request in suspects if (call := self.call_of(request)) is not None]
        self._deaths.update({call.group for call in calls})
        return {
            call.request: HopelessError(
                f"{name_of(call)} was in user code, as its group had been at {MAX_DEATHS - 1} deaths of environment "
                f"processes before, when its process died as well: {why}"
            )
            for call in calls
            if self._deaths[call.group] >= MAX_DEATHS
        }

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        for host, calls in enumerate(self._outgoing):
            if not calls or not self._up[host] or self._failure is not None:
                continue
            self._outgoing[host] = []
            try:
                self._senders[host](Environments(calls=calls))
            except (TypeError, ValueError, OverflowError) as error:  # msgpack's, for what is no plain value
                names = ", ".join(map(name_of, filter(_is_unencodable, calls)))
                self._on_error(
                    RunError(f"What the environment is told can't be sent ({names}): {error}; use plain values.")
                )


def name_of(call: EnvironmentCall, method: str = "") -> str:
    """The call in words; method: of the user's, where that is known."""
    return f"{method or METHODS[call.call]} of trajectory {call.group}.{call.member}"


def _is_unencodable(call: EnvironmentCall) -> bool:
    try:
        encode(Environments(calls=[call]), 0)
    except (TypeError, ValueError, OverflowError):
        return True
    return False
