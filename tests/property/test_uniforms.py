"""The noise of sampling: uniform, independent between neighbours, a function of four numbers and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.generation.sampling import stream_keys, stream_uniforms, uniforms

integers = st.integers(-(2**62), 2**62)
WORD = 2**64


def slow_mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % WORD
    return state ^ (state >> 31)


def slow_uniform(seed: int, group: int, member: int, position: int) -> float:
    """The definition, in Python's unbounded integers."""
    state = slow_mix((seed + 0x9E3779B97F4A7C15) % WORD)
    for number in (group, member, position):
        state = slow_mix((state + (number + 1) * 0x9E3779B97F4A7C15) % WORD)
    return (state >> 11) / 2**53


@given(
    seed=st.integers(-(2**70), 2**70), rows=st.lists(st.tuples(integers, integers, integers), min_size=1, max_size=5)
)
def test_uniforms_equal_their_definition(seed, rows):
    groups, members, positions = np.array(rows, dtype=np.int64).T
    expected = [slow_uniform(seed, *row) for row in rows]
    assert uniforms(seed, groups, members, positions).tolist() == expected
    assert stream_uniforms(stream_keys(seed, groups, members), positions).tolist() == expected
    assert all(0.0 <= value < 1.0 for value in expected)


def grid(seed: int = 0) -> np.ndarray:
    """[groups -20 … 19, members 16, positions 64]."""
    groups, members, positions = np.meshgrid(np.arange(-20, 20), np.arange(16), np.arange(64), indexing="ij")
    flat = uniforms(seed, groups.ravel(), members.ravel(), positions.ravel())
    return flat.reshape(groups.shape)


def test_uniforms_are_evenly_distributed():
    values = grid()
    counts = np.histogram(values, bins=64, range=(0, 1))[0]
    expected = values.size / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 30 < chi_square < 110  # 63 degrees of freedom: mean 63, deviation 11
    assert len(np.unique(values)) == values.size


def test_neighbours_are_independent_along_every_axis():
    values = grid()
    bound = 5 / np.sqrt(values.size)  # five deviations of a correlation of independent pairs
    for axis in range(3):
        for distance in (1, 2, 3):
            first = np.moveaxis(values, axis, 0)[:-distance].ravel()
            second = np.moveaxis(values, axis, 0)[distance:].ravel()
            assert abs(np.corrcoef(first, second)[0, 1]) < bound * 1.3
            # Pairs fill the unit square evenly, too: no lattice as of weak counters.
            cells = np.histogram2d(first, second, bins=8, range=((0, 1), (0, 1)))[0]
            expected = len(first) / 64
            assert ((cells - expected) ** 2 / expected).sum() < 120


def test_every_bit_of_the_seed_counts():
    base = grid(0).ravel()
    for seed in (1, 2, 2**31, 2**63, -1):
        other = grid(seed).ravel()
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03
