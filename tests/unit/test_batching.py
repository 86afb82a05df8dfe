"""The rules of what one forward pass computes."""

import numpy as np

from workers.generation.batching import (
    SHORT_KEYS,
    SHORT_QUERY,
    assign_lanes,
    attention_groups,
    share_budget,
    token_places,
)


def shares(pending: list[int], budget: int) -> list[int]:
    return share_budget(np.array(pending, dtype=np.int64), budget).tolist()


def test_everything_is_taken_when_it_fits():
    assert shares([1, 5, 1, 3], 10) == [1, 5, 1, 3]


def test_decoding_sequences_come_before_prefill():
    assert shares([6, 1, 4, 1], 8) == [6, 1, 0, 1]
    assert shares([6, 1, 4, 1], 5) == [3, 1, 0, 1]  # the first prefill gets a chunk of what is left
    assert shares([1, 1, 1], 2) == [1, 1, 0]


def test_a_waiting_sequence_takes_nothing():
    assert shares([0, 1, 9], 4) == [0, 1, 3]


def groups_of(takes: list[int], ends: list[int]) -> list[list[int]]:
    found = attention_groups(np.array(takes), np.array(ends))
    return [indices.tolist() for _, groups in found for indices in groups]


def test_short_work_is_one_group():
    assert groups_of([1, 3, SHORT_QUERY], [5, SHORT_KEYS, 40]) == [[0, 1, 2]]


def test_long_prefill_and_long_contexts_go_apart():
    assert groups_of([1, 200, 1, 30], [5, 200, 600, 30]) == [[0], [3], [1], [2]]


def test_padding_stays_below_four_times_the_work_in_each_direction():
    rng = np.random.default_rng(0)
    takes = rng.integers(1, 3000, 200)
    ends = takes + rng.integers(0, 20000, 200)
    seen = []
    for key_class, groups in attention_groups(takes, ends):
        for indices in groups:
            seen += indices.tolist()
            assert ends[indices].max() <= SHORT_KEYS * 4**key_class
            assert key_class == 0 or ends[indices].max() < 4 * ends[indices].min()
            assert takes[indices].max() <= SHORT_QUERY or takes[indices].max() < 4 * takes[indices].min()
    assert sorted(seen) == list(range(200))


def test_lanes_move_as_few_sequences_as_possible():
    assert assign_lanes(np.array([2, 0, 1])).tolist() == [2, 0, 1]
    assert assign_lanes(np.array([-1, -1])).tolist() == [0, 1]
    assert assign_lanes(np.array([1, 3, -1, 0])).tolist() == [1, 3, 2, 0]
    assert assign_lanes(np.array([5, 1, 0])).tolist() == [2, 1, 0]  # lane 5 is beyond the end and moves into the gap


def test_token_places_run_through_each_sequence():
    sequence, position = token_places(np.array([4, 0, 9]), np.array([2, 3, 1]))
    assert sequence.tolist() == [0, 0, 1, 1, 1, 2]
    assert position.tolist() == [4, 5, 0, 1, 2, 9]
