"""Where the time of a run's processes goes (`time/*`), and the memory they hold (`memory/*`).

A process is busy, waiting (for another one, with its own work begun) or idle (nothing to do). Workers book their time
in the ledger, environment processes in blocks of their own; the trainer books its own here. The three add up to the
interval since the previous step's metrics.
"""

import os
import time
from collections.abc import Callable, Mapping

from shm.ledger import WorkerRow

STATES = ("busy", "waiting", "idle")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class TimeAccount:
    """The trainer's own time. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = "idle"
        self._since = clock()
        self._seconds = dict.fromkeys(STATES, 0.0)

    def switch(self, state: str) -> str:
        """From now on it is in `state`; returns the one before."""
        now = self._clock()
        self._seconds[self._state] += now - self._since
        before, self._state, self._since = self._state, state, now
        return before

    def take(self) -> dict[str, float]:
        """The interval's metrics; the next interval begins."""
        self.switch(self._state)
        taken, self._seconds = self._seconds, dict.fromkeys(STATES, 0.0)
        return {f"time/trainer_{state}_seconds": seconds for state, seconds in taken.items()}


class WorkerTimes:
    """What the workers have booked, interval by interval. rows: process name -> its row."""

    def __init__(self, rows: Mapping[str, WorkerRow], clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._rows = dict(rows)
        self._clock_ns = clock_ns
        self._before = {name: row.times_ns(clock_ns()) for name, row in self._rows.items()}

    def take(self) -> dict[str, float]:
        metrics = {}
        for name, row in self._rows.items():
            now = row.times_ns(self._clock_ns())
            for state, new, old in zip(STATES, now, self._before[name], strict=True):
                metrics[f"time/{name}_{state}_seconds"] = max(0, new - old) / 1e9
            self._before[name] = now
        return metrics


def memory_metrics(pids: Mapping[str, int]) -> dict[str, float]:
    """Resident host memory of each process, shared blocks included: `memory/<process>_bytes`. A dead one is left
    out.
    """
    metrics = {}
    for name, pid in pids.items():
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                metrics[f"memory/{name}_bytes"] = int(file.read().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):  # it has just ended
            continue
    return metrics
