"""Any mix and any seed: every round of a part has each of its rows once, and shares are right at every admission."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.row_order import RowOrder

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=12)
WEIGHTS = st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3))
SEEDS = st.one_of(st.none(), st.integers(0, 2**63 - 1))


@st.composite
def mixes(draw):
    sizes = draw(SIZES)
    return sizes, draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))


def part_of(row, sizes):
    part = 0
    while row >= sizes[part]:
        row -= sizes[part]
        part += 1
    return part, row


@given(st.integers(1, 50), st.integers(0, 300))
def test_without_a_seed_rows_come_in_order_again_and_again(size, index):
    assert RowOrder([size]).row(index) == index % size


@given(mixes(), SEEDS)
def test_shares_are_right_to_within_one_at_every_admission(mix, seed):
    sizes, weights = mix
    order = RowOrder(sizes, weights=weights, seed=seed)
    total = sum(map(Fraction, weights))
    taken = [0] * len(sizes)
    for index in range(60):
        taken[part_of(order.row(index), sizes)[0]] += 1
        for count, weight in zip(taken, weights, strict=True):
            assert abs(count - Fraction(weight) / total * (index + 1)) < 1


@given(mixes(), SEEDS)
def test_each_part_goes_round_on_its_own(mix, seed):
    sizes, weights = mix
    order = RowOrder(sizes, weights=weights, seed=seed)
    seen = [[] for _ in sizes]
    for index in range(60):
        part, row = part_of(order.row(index), sizes)
        seen[part].append(row)
    for size, rows in zip(sizes, seen, strict=True):
        rounds = [rows[start : start + size] for start in range(0, len(rows), size)]
        for one in rounds:
            assert sorted(one) == list(range(size)) or (one is rounds[-1] and len(set(one)) == len(one) < size)
            assert seed is not None or one == list(range(len(one)))


@given(mixes(), SEEDS, st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_a_row_depends_on_its_index_alone(mix, seed, indices):
    """Whatever was asked before: what a run that goes on later relies on."""
    sizes, weights = mix
    once = RowOrder(sizes, weights=weights, seed=seed)
    expected = [once.row(index) for index in range(101)]
    other = RowOrder(sizes, weights=weights, seed=seed)
    assert [other.row(index) for index in indices] == [expected[index] for index in indices]
