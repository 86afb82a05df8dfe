"""`--max-minutes`: when a run must be asked to stop, so that it has saved and ended before its time is over."""

import asyncio
import time
from collections.abc import Callable

END_SECONDS = 8.0  # that processes take to end, and Python behind them: 1 to 2, and 5.5 where users' code holds one
LOOK_SECONDS = 1.0  # between two looks at the clock, as the reserve grows


class TimeLimit:
    """Of one run. `note` what its updates and saves take; `over` returns when it is time to stop."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The time counts from now."""
        self._seconds = 60.0 * minutes
        self._clock = clock
        self._began = clock()
        self._longest: dict[str, float] = {}

    def note(self, what: str, seconds: float) -> None:
        """An update, or a save, has taken so long: the last one may take as long again, and twice that on a machine
        that has grown busy.
        """
        self._longest[what] = max(self._longest.get(what, 0.0), seconds)

    @property
    def reserve(self) -> float:
        """Seconds kept back for the update that has begun, the save and the end; at most half of all the time, so that
        a short one isn't spent on its end.
        """
        return min(0.5 * self._seconds, END_SECONDS + 2.0 * sum(self._longest.values()))

    @property
    def left(self) -> float:
        """Seconds until the run must be asked to stop; negative when that is past."""
        return self._began + self._seconds - self.reserve - self._clock()

    async def over(self) -> None:
        while (left := self.left) > 0.0:
            await asyncio.sleep(min(left, LOOK_SECONDS))
