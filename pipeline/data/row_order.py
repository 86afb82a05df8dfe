"""RowOrder: which dataset row each admission gets, in order or shuffled, of one dataset or of a mix by weight.

A pure function of (admission index, sizes, weights, seed), so a run that goes on later gets the rows it would have got.
"""

from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np


class RowOrder:
    """Rows 0 … sum(sizes) - 1, the parts one after the other.

    Each part goes round on its own: its rows in order, again and again; with a seed, in a new random order each time
    round. weights (any positive numbers; None: equal ones) are the parts' shares of the admissions: at every index, how
    often a part was taken differs from its share by less than 1. Parts are asked in order of index at O(parts) each,
    and then known; a shuffled part costs one sort each time round.
    """

    def __init__(
        self, sizes: Sequence[int], *, weights: Sequence[float] | None = None, seed: int | None = None
    ) -> None:
        assert sizes and min(sizes) >= 1, f"a part of {list(sizes)} has no rows"
        self.sizes = tuple(sizes)
        self._seed = seed
        self._first_rows = [sum(self.sizes[:part]) for part in range(len(self.sizes))]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # part -> which round, and its rows in order
        # Shares as whole numbers, so that no rounding adds up over a long run.
        exact = [Fraction(weight) for weight in weights or (1,) * len(sizes)]
        assert len(exact) == len(sizes) and min(exact) > 0, f"{weights} are no weights of {len(sizes)} parts"
        unit = lcm(*(weight.denominator for weight in exact))
        self._shares = [int(weight * unit) for weight in exact]
        self._total = sum(self._shares)
        self._taken = [0] * len(sizes)  # of each part, by the indices known so far
        self._parts = array("l")  # of each index known so far
        self._turns = array("q")  # how often its part was taken before

    def row(self, index: int) -> int:
        """The row of admission `index`, which counts from 0."""
        if len(self.sizes) == 1:
            return self._row_of(0, index)
        while len(self._parts) <= index:
            self._take_next()
        part = self._parts[index]
        return self._first_rows[part] + self._row_of(part, self._turns[index])

    def _take_next(self) -> None:
        """Give the next index to a part: of those behind their share, the one that would fall a whole row behind first.

        Unit jobs, each released when its part's share has begun it and due when the share has completed it, meet all
        their deadlines if the earliest goes first (as in Pfair scheduling: Baruah et al., Algorithmica 15, 1996). The
        part that is furthest behind, which seems plainer, lets others slip by more than a row when many are mixed.
        """
        now = len(self._parts) + 1
        best = min(
            (
                (-(-(taken + 1) * self._total // share), taken * self._total - share * now, part)
                for part, (share, taken) in enumerate(zip(self._shares, self._taken, strict=True))
                if taken * self._total < share * now
            )
        )
        part = best[2]
        self._parts.append(part)
        self._turns.append(self._taken[part])
        self._taken[part] += 1

    def _row_of(self, part: int, turn: int) -> int:
        """Row within the part, the `turn`-th time that the part is taken."""
        round_, position = divmod(turn, self.sizes[part])
        if self._seed is None:
            return position
        known, order = self._orders.get(part, (-1, None))
        if known != round_:
            order = shuffled(self.sizes[part], (self._seed, part, round_))
            self._orders[part] = round_, order
        return int(order[position])


def shuffled(size: int, seed: tuple[int, ...]) -> np.ndarray:
    """A permutation of range(size), int64, by whole numbers of at least 0.

    Sorted random words: of numpy's random streams only a bit generator's words are promised to stay the same from
    release to release, not what `permutation` makes of them.
    """
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(words, kind="stable")
