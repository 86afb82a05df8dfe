"""What a trajectory is at, for those who wait for it: what, since when, and what would end it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Doing:
    """cause: queue, sampling, tool or reward, as `wait` events and `staleness/wait_seconds/<cause>` name it. words: the
    same more closely. since: when it began, by the monotonic clock.
    """

    cause: str
    words: str
    since: float = field(default_factory=time.monotonic)

    def told(self, ends_by: str, now: float | None = None) -> str:
        """`tool search for 12 s, ended by …`."""
        seconds = max(0.0, (time.monotonic() if now is None else now) - self.since)
        return f"{self.words} for {seconds:.0f} s, {ends_by}"


class Held(NamedTuple):
    """Who holds others up. trajectory: None of a group of which none runs yet. cause, words: of its Doing, since when,
    and what would end it.
    """

    trajectory: str | None
    cause: str
    words: str
    group: int | None = None


def in_line() -> Doing:
    return Doing("queue", "waiting for its turn")


def acting(calls: Sequence[dict[str, Any]]) -> Doing:
    """The environment's part of a turn with these tool calls; without any, its last, which brings the reward."""
    names = ", ".join(dict.fromkeys(str(call["name"]) for call in calls))
    return Doing("tool", f"tool {names}") if calls else Doing("reward", "on_turn or reward")
