"""How long a process has not got on: a rule over what is seen of it, look by look, without a clock of its own.

Only time that somebody watched counts, at most MOST_SECONDS from one look to the next. A supervisor that was itself
stopped, or busy, for minutes (a suspended container, a frozen terminal) then finds every heartbeat old, and must not
take that for a hang of everyone else.
"""

from enum import Enum
from typing import NamedTuple

from workers.processes.process_stat import ON_DISK, ProcessStat

MOST_SECONDS = 2.0  # that one look may add
HALTED_SECONDS = 1.0  # the same of one that somebody has stopped: it gets nowhere for certain
NAMED_SECONDS = 3.0  # without getting on, after which a process is named; idle ones beat every half second


class Phase(Enum):
    """What shows that a process gets on."""

    STARTING = 1  # imports, weights being read: the processor or bytes that it uses, or a heartbeat
    IDLE = 2  # nothing: it waits to be told something, and only a stop is told of it
    SERVING = 3  # its heartbeat alone: a loop that does not end uses the processor, too


class Sight(NamedTuple):
    """One look. heartbeat_ns: the latest one of this incarnation, 0 before the first."""

    incarnation: int
    phase: Phase
    heartbeat_ns: int
    stat: ProcessStat
    bytes_moved: int = 0


class Stillness:
    """Of one process's place: a new incarnation begins anew."""

    def __init__(self) -> None:
        self.seconds = 0.0  # since it last got on
        self._last: Sight | None = None
        self._computes = False

    def see(self, sight: Sight, seconds: float) -> None:
        """`seconds` after the look before."""
        before, self._last = self._last, sight
        if before is None or _got_on(before, sight):
            self.seconds = 0.0
            self._computes = False
        else:
            self.seconds += min(seconds, MOST_SECONDS)
            self._computes = sight.stat.ticks > before.stat.ticks

    @property
    def halted(self) -> bool:
        return self._last is not None and self._last.stat.halted

    @property
    def is_named(self) -> bool:
        """Whether it is to be told of."""
        return self.seconds >= (HALTED_SECONDS if self.halted else NAMED_SECONDS)

    @property
    def words(self) -> str:
        """What it does instead, for a sentence that begins with its name."""
        seconds = f"{self.seconds:.0f} s"
        if self.halted:
            return f"has been stopped for {seconds} (SIGSTOP, or a debugger)"
        if self._computes:
            return f"has computed for {seconds} without a sign of life"
        if self._last is not None and self._last.stat.state == ON_DISK:
            return f"has waited for a disk or a device for {seconds}"
        return f"has given no sign of life for {seconds}"


def _got_on(before: Sight, sight: Sight) -> bool:
    if (before.incarnation, before.phase) != (sight.incarnation, sight.phase):
        return True
    if before.heartbeat_ns != sight.heartbeat_ns:
        return True
    if sight.phase is Phase.IDLE:
        return not sight.stat.halted
    used = (before.stat.ticks, before.bytes_moved) != (sight.stat.ticks, sight.bytes_moved)
    return sight.phase is Phase.STARTING and used
