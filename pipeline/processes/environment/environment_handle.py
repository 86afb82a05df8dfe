"""One trajectory's environment, seen from the supervisor: its calls, and what becomes of it when its process is lost.

With `recovery = "drop"` a lost environment is told to whoever leads the trajectory (`EnvironmentLost`), who starts
again. With "stateless" or "snapshot" nobody hears of it: at the next call another process makes an instance, rebuilds
what it had seen from what was said so far, restores the last snapshot, and gets the call (again, if it was under way).
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.errors import TookTooLongError, TrajectoryError
from workers.messages import EnvironmentReply

if TYPE_CHECKING:  # the client makes the handles
    from pipeline.processes.environment.environment_client import EnvironmentClient


class Dropped(Exception):
    """The environment was dropped while a call of it was under way."""


class EnvironmentLost(Exception):
    """The environment's process is gone, and it can't be restored: the trajectory is to start again."""


class EnvironmentHandle:
    """`call` until a reply holds a reward, or `drop`.

    on_lost: called when its process is lost and it can't be restored, also while no call is under way. on_restored:
    when another process has gone on with it.
    """

    def __init__(self, client: "EnvironmentClient", group: int, member: int) -> None:
        self.group = group
        self.member = member
        self.on_lost: Callable[[], None] = lambda: None
        self.on_restored: Callable[[], None] = lambda: None
        self._client = client
        self._host: int | None = None
        self._lost: str | None = None  # why, from a loss to the next host
        self._dropped = False
        self._pending: tuple[str, asyncio.Future[EnvironmentReply]] | None = None  # the call under way
        self._turn_under_way = False
        self._interrupted_by: str | None = None  # the cause given to `interrupt`
        self._truncation: asyncio.Future[EnvironmentReply] | None = None  # by which that ends a turn
        self._story: dict[str, Any] | None = None  # the argument of `restore`; None: it can't be restored

    @property
    def waits_for_process(self) -> bool:
        """Whether its call can't be made before another process is there."""
        return self._lost is not None or (self._host is not None and not self._client.is_up(self._host))

    async def call(self, call: str, argument: dict[str, Any]) -> EnvironmentReply:
        """reset, turn or truncate (see `EnvironmentCall`). Raises TrajectoryError with the host's sentence if it
        failed, Dropped, and EnvironmentLost.

        The reply of a turn that was interrupted is that of its truncation, unless the turn had its answer first.
        """
        self._turn_under_way, self._interrupted_by = call == "turn", None
        try:
            reply = await self._call(call, argument)
        finally:
            self._turn_under_way = False
            self._pending = None
        if reply.error is not None:
            self._close()
            raise _error_of(reply)
        if "reward" in reply.result:
            self._close()
        else:
            self._remember(call, argument, reply.result)
        return reply

    @property
    def story(self) -> dict[str, Any] | None:
        """What another process, of another run too, can go on from: the argument of `restore`; None: nothing."""
        return self._story

    def resume(self, story: dict[str, Any]) -> None:
        """Go on with the environment of an earlier run: the first call restores it."""
        self._story, self._lost = story, "the run was resumed"

    def interrupt(self, cause: str) -> None:
        """End a turn that is under way by a truncation with `cause`; any other call goes on."""
        if not self._turn_under_way:
            return
        self._interrupted_by = cause
        if self._pending is not None and self._pending[0] == "turn" and not self._pending[1].done():
            self._truncation = self._send("truncate", {"cause": cause})

    def drop(self) -> None:
        """Close it without a reward, and end a call that is under way; does nothing when it is closed already."""
        self._dropped = True
        if self._pending is not None and not self._pending[1].done():
            self._pending[1].set_exception(Dropped())
        if self._host is not None:
            dropped = self._send("drop", {})
            self._close()
            dropped.add_done_callback(_ignore)

    def note_lost(self, why: str) -> None:
        """The client's word that its process is gone; whoever waits for a call of it is told already."""
        self._host, self._lost = None, why
        if self._story is None:
            self.on_lost()

    async def _call(self, call: str, argument: dict[str, Any]) -> EnvironmentReply:
        while True:
            if self._dropped:
                raise Dropped
            try:
                if self._host is None:
                    await self._find_host()
                if self._interrupted_by is not None and call == "turn":  # while it was restored
                    call, argument = "truncate", _truncation_of(argument, self._interrupted_by)
                return await self._ask(call, argument)
            except EnvironmentLost:
                if self._story is None:
                    raise

    async def _find_host(self) -> None:
        """A first host, or another one in place of one that is lost."""
        if self._lost is not None and self._story is None:
            raise EnvironmentLost(self._lost)
        self._host, self._lost = self._client.choose(), None
        self._client.open_at[self._host].add(self)
        if self._story is not None:
            self._pending = ("restore", self._send("restore", self._story))
            reply = await self._pending[1]
            if reply.error is not None:
                self._close()
                raise _error_of(reply)
            self.on_restored()

    async def _ask(self, call: str, argument: dict[str, Any]) -> EnvironmentReply:
        self._truncation = None
        future = self._send(call, argument)
        self._pending = (call, future)
        reply = await future
        if self._truncation is not None and "reward" not in reply.result:
            self._pending = ("truncate", self._truncation)
            truncated = await self._truncation
            if truncated.error is not None and reply.error is not None:  # whichever of the two says why
                truncated = truncated._replace(error=f"{reply.error}; {truncated.error}")
            reply = truncated
        return reply

    def _send(self, call: str, argument: dict[str, Any]) -> asyncio.Future[EnvironmentReply]:
        assert self._host is not None, "a call goes to a host"
        return self._client.send(self._host, self.group, self.member, call, argument)

    def _remember(self, call: str, argument: dict[str, Any], result: dict[str, Any]) -> None:
        """What another process will need to go on from here, if the environment says that it can."""
        if call == "reset":
            if result.get("recovery", "drop") != "drop":
                self._story = argument | {"messages": result["messages"], "turns": []}
        elif self._story is not None:
            self._story["turns"].append(
                {"turn": argument, "messages": result["messages"], "rewrites": result.get("rewrites", False)}
            )
        if self._story is not None:
            self._story |= {key: result[key] for key in ("snapshot", "loss_mask_end") if key in result}

    def _close(self) -> None:
        if self._host is not None:
            self._client.open_at[self._host].discard(self)
            self._host = None


def _error_of(reply: EnvironmentReply) -> TrajectoryError:
    return (TookTooLongError if reply.result.get("timed_out") else TrajectoryError)(reply.error)


def _truncation_of(turn: dict[str, Any], cause: str) -> dict[str, Any]:
    """The argument of a truncation in place of a turn that was not acted on."""
    seen = {key: value for key, value in turn.items() if key != "unseen"}
    return {"cause": cause, "unseen": [*turn.get("unseen", ()), seen]}


def _ignore(future: asyncio.Future) -> None:
    """A drop's reply says nothing, and at the end of a run it may never come."""
    if not future.cancelled():
        future.exception()
