"""Which waiting trajectory comes first, to start and at a sampler: `Schedule(priority=...)`, as plain rules.

Groups of an older version always come first: they have the nearer deadline. Among groups of one version, "fifo" takes
them in order of admission; "predicted_length" takes the longest expected first, since what is started last ends last,
and a short trajectory fills the gap better.
"""

from typing import NamedTuple

from pipeline.config import PRIORITIES

PREDICTED_LENGTH = PRIORITIES[1]


class Priority(NamedTuple):
    """Compares as it is meant: the smaller comes first."""

    version: int  # at the group's admission
    rank: float = 0.0  # minus the tokens expected, where these count


class LengthPredictor:
    """How long a trajectory of a row will be, in generated tokens: the mean of the row's earlier ones, else of all."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, int]] = {}  # row -> (trajectories, their tokens)
        self._all = (0, 0)

    def add(self, row: int, tokens: int) -> None:
        """A trajectory of `row` has ended with so many generated tokens."""
        count, total = self._rows.get(row, (0, 0))
        self._rows[row] = (count + 1, total + tokens)
        self._all = (self._all[0] + 1, self._all[1] + tokens)

    def expected(self, row: int) -> float:
        """0 as long as nothing is known."""
        count, total = self._rows.get(row, self._all)
        return total / count if count else 0.0


def priority_of(order: str, version: int, row: int, lengths: LengthPredictor) -> Priority:
    """The priority of a group of `row` that was admitted at `version`."""
    return Priority(version, -lengths.expected(row) if order == PREDICTED_LENGTH else 0.0)
