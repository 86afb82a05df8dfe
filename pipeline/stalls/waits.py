"""Who the trainer waits for: the `wait` events, and the sums that become `staleness/wait_*`.

A wait has a reason: `ready` (too few groups yet), `slot` (every weight slot is leased), or, when the staleness bound
holds back a full batch, what the trajectory that everyone waits for is doing: sampling, tool, reward, queue. Its detail
says since when, and what would end it; behind that stand the run's processes that do not get on, if there are any.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.run_dir.events import EventLog

REPORT_SECONDS = 10.0  # a wait that lasts is reported this often
LOOK_SECONDS = 1.0  # and looked at this often, for another reason and for processes that stand still


@dataclass(frozen=True, slots=True)
class Culprit:
    """What is waited for."""

    why: str
    group: int | None
    trajectory: str | None
    detail: str


class Waits:
    """The waits of one batch after the other. `clock` gives seconds; standing_still(), which of the run's processes do
    not get on, in words.
    """

    def __init__(
        self, events: EventLog, clock: Callable[[], float], standing_still: Callable[[], str] = lambda: ""
    ) -> None:
        self._events = events
        self._clock = clock
        self._standing_still = standing_still
        self._stood_still = ""  # what the latest event of this wait has told of it
        self._current: Culprit | None = None
        self._step = 0
        self._reported = 0.0
        self._counting: tuple[str, float] | None = None  # cause, and since when it counts
        self.reset()

    @property
    def words(self) -> str:
        """What is waited for now; empty outside a wait."""
        return "" if self._current is None else self.with_processes(self._current.detail)

    def with_processes(self, words: str) -> str:
        """`words`, and behind them which processes stand still."""
        standing = self._standing_still()
        return f"{words}; {standing}" if standing else words

    def reset(self) -> None:
        """A new batch begins."""
        self.bound_seconds = 0.0  # of pulls that began while a full batch was held back
        self.bound_count = 0
        self.by_cause: dict[str, float] = defaultdict(float)
        self.slot_seconds = 0.0  # a batch was chosen, but no slot was free for the version after it

    def begin(self, step: int, culprit: Culprit) -> None:
        """The trainer waits for `culprit` from now on; one for the same reason and group goes on, in its new words."""
        if self._current is not None and (self._current.why, self._current.group) == (culprit.why, culprit.group):
            self.look(culprit)  # where something else comes all the time, nobody waits long enough to look
            return
        self.end()
        self._current, self._step, self._reported, self._stood_still = culprit, step, self._clock(), ""

    def look(self, culprit: Culprit) -> None:
        """About once a second while it lasts; `culprit` says what is waited for now. An event tells of it every
        REPORT_SECONDS, when the reason is another one, and when a process has begun to stand still.
        """
        is_another = (self._current.why, self._current.group) != (culprit.why, culprit.group)
        is_due = self._clock() - self._reported >= REPORT_SECONDS
        stands_still = bool(self._standing_still()) and not self._stood_still
        if not is_another:
            self._current = culprit
        if is_another or is_due or stands_still:
            self._write()
            self._events.flush()  # on disk at once: the run may have stalled
        self._current = culprit
        if is_another and self._counting is not None:
            self._counting = culprit.why, self._count()

    def end(self) -> None:
        """It is over, or its reason has changed."""
        if self._current is not None:
            self._write()
            self._current = None

    def begin_counting(self, cause: str) -> None:
        """A pull begins while a full batch is held back by the bound; looks divide it between the causes."""
        self.bound_count += 1
        self._counting = cause, self._clock()

    def end_counting(self) -> None:
        """The pull has ended; nothing happens if it was none that counts."""
        if self._counting is not None:
            self._count()
            self._counting = None

    def _count(self) -> float:
        """Add the slice that ends now, and return when that is."""
        cause, since = self._counting
        now = self._clock()
        self.bound_seconds += now - since
        self.by_cause[cause] += now - since
        return now

    def _write(self) -> None:
        now = self._clock()
        culprit = self._current
        self._stood_still = self._standing_still()
        self._events.log(
            "wait",
            step=self._step,
            seconds=round(now - self._reported, 6),
            group=culprit.group,
            trajectory=culprit.trajectory,
            why=culprit.why,
            detail=f"{culprit.detail}; {self._stood_still}" if self._stood_still else culprit.detail,
        )
        self._reported = now
