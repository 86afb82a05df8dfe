"""What processes hold over time, looked at from outside, and how fast it grows."""

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.soak.processes import Seen, Use, processes_of, use_of

LOOK_SECONDS = 1.0
LEAST_LOOKS = 20  # of a process, for a growth to mean something

Look = tuple[float, Use]  # when, in seconds of time.monotonic


class MemoryLog:
    """`looks` of each process that there was."""

    def __init__(self) -> None:
        self.looks: dict[Seen, list[Look]] = defaultdict(list)
        self._next = 0.0

    def look(self, mark: str, now: float) -> None:
        """At all processes of a run, if it is time again."""
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        for process in processes_of(mark):
            if (use := use_of(process)) is not None:
                self.looks[process].append((time.monotonic(), use))

    def most(self) -> dict[str, dict[str, int]]:
        """The most that a process of each role held at once."""
        found: dict[str, dict[str, int]] = {}
        for process, looks in self.looks.items():
            role = found.setdefault(process.role, {"rss_bytes": 0, "descriptors": 0, "threads": 0})
            for _, use in looks:
                for name in role:
                    role[name] = max(role[name], getattr(use, name))
        return dict(sorted(found.items()))

    def growth(self, count: float) -> dict[str, dict[str, float]]:
        """By process name (role and number): what it grew by after its first quarter, in bytes of memory, descriptors
        and threads per 1,000 units of work, of which `count` were done from its first look to its last.
        """
        found: dict[str, dict[str, float]] = {}
        for process, looks in sorted(self.looks.items(), key=lambda item: (item[0].role, item[0].created)):
            if len(looks) >= LEAST_LOOKS:
                number = sum(name.startswith(process.role) for name in found)
                found[f"{process.role}-{number}"] = _growth_per_1000(looks, count)
        return found


def _growth_per_1000(looks: Sequence[Look], count: float) -> dict[str, float]:
    """By the medians of the second and the last quarter, which lie half the time apart."""
    quarter = len(looks) // 4
    first, last = looks[quarter : 2 * quarter], looks[-quarter:]
    share = 0.5 * count / 1000
    grown = {}
    for name in ("rss_bytes", "descriptors", "threads"):
        before, after = (float(np.median([getattr(use, name) for _, use in some])) for some in (first, last))
        grown[name] = round((after - before) / share, 1)
    return grown
