"""The order of rows: what a seed gives stays what it is, rounds differ, and a rare part is spread out."""

import numpy as np

from pipeline.data.row_order import RowOrder, shuffled


def test_rounds_and_seeds_differ():
    first, second, other = (
        [RowOrder([50], seed=seed).row(index) for index in range(start, start + 50)]
        for seed, start in ((1, 0), (1, 50), (2, 0))
    )
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert first != second and first != other and first != list(range(50))


def test_parts_of_one_size_are_not_shuffled_alike():
    order = RowOrder([50, 50], seed=3)
    rows = [order.row(index) for index in range(100)]
    assert [row for row in rows if row < 50] != [row - 50 for row in rows if row >= 50]


def test_shuffle_is_the_same_in_every_release():
    """Recorded: a run that goes on later, with another numpy, must get the rows it would have got."""
    assert shuffled(10, (7, 0, 2)).tolist() == [0, 3, 7, 1, 6, 9, 4, 8, 5, 2]
    assert shuffled(10, (7, 0, 2)).dtype == np.int64


def test_a_rare_part_is_spread_out():
    order = RowOrder([1, 1], weights=[3, 1])
    assert [order.row(index) for index in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]


def test_weights_that_no_float_adds_up_exactly_stay_exact():
    order = RowOrder([1] * 10, weights=[0.1] * 10)
    rows = [order.row(index) for index in range(20_000)]
    assert np.bincount(rows).tolist() == [2_000] * 10
    assert all(sorted(rows[start : start + 10]) == list(range(10)) for start in range(0, 20_000, 10))


def test_furthest_behind_first_would_not_keep_within_one():
    """Why the earliest deadline goes first: the plainer rule, on a mix of a few large and many small parts."""
    weights = [10] * 3 + [1] * 10
    taken, worst = [0] * len(weights), 0.0
    for index in range(1, 301):
        behind = [weight * index / 40 - count for weight, count in zip(weights, taken, strict=True)]
        first = behind.index(max(behind))
        taken[first] += 1
        behind[first] -= 1
        worst = max(worst, *behind)
    assert worst > 1.2
    order, taken = RowOrder([1] * len(weights), weights=weights), [0] * len(weights)
    for index in range(1, 301):
        taken[order.row(index - 1)] += 1
        assert all(abs(weight * index / 40 - count) < 1 for weight, count in zip(weights, taken, strict=True))
