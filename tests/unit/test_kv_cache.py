"""Bookkeeping of the KV pool: reuse, sharing, eviction, and that every row comes back."""

import numpy as np
import pytest

from workers.generation.kv_cache import ORPHAN, WRITTEN, KVTables, common_prefix


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def compute(cache: KVTables, seat: int) -> int:
    """What a pass does for one seat; returns how many tokens it computed."""
    begin = int(cache.computed[seat])
    end = cache.frontier(seat) if seat in cache.borrowed else int(cache.length[seat])
    begin = int(cache.computed[seat])
    cache.pool.writer[cache.rows[seat, begin:end]] = WRITTEN
    cache.computed[seat] = end
    return end - begin


def begin(cache: KVTables, member: int, tokens: np.ndarray, *, version: int = 0, group: int = 0) -> int:
    seat = cache.open(version, group, member, tokens, len(tokens) + 4)
    assert cache.start(seat)
    return seat


def rows_of(cache: KVTables, seat: int) -> list[int]:
    return cache.rows[seat, : cache.allocated[seat]].tolist()


def test_common_prefix():
    assert common_prefix(ids(1, 2, 3), ids(1, 2, 4)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 4)) == 2
    assert common_prefix(ids(), ids(1)) == 0
    assert common_prefix(ids(5), ids(1)) == 0


def test_a_next_request_keeps_the_prefix_and_computes_the_rest():
    cache = KVTables(20)
    seat = begin(cache, 0, ids(1, 2, 3))
    assert compute(cache, seat) == 3
    cache.park(seat)
    kept = rows_of(cache, seat)
    assert begin(cache, 0, ids(1, 2, 3, 4, 5)) == seat
    assert rows_of(cache, seat)[:3] == kept
    assert cache.computed[seat] == 3 and compute(cache, seat) == 2


def test_a_context_that_turns_elsewhere_gives_its_tail_back():
    cache = KVTables(20)
    seat = begin(cache, 0, ids(1, 2, 3, 4))
    compute(cache, seat)
    cache.park(seat)
    begin(cache, 0, ids(1, 2, 9))
    assert cache.computed[seat] == 2 and cache.allocated[seat] == 3
    cache.release(0, 0)
    assert cache.pool.num_free == 20


def test_the_last_context_token_is_always_computed():
    cache = KVTables(20)
    seat = begin(cache, 0, ids(1, 2, 3))
    compute(cache, seat)
    cache.park(seat)
    begin(cache, 0, ids(1, 2, 3))
    assert cache.computed[seat] == 2 and compute(cache, seat) == 1


def test_group_members_share_the_common_prompt_only():
    cache = KVTables(20)
    first = begin(cache, 0, ids(1, 2, 3, 4))
    compute(cache, first)
    second = begin(cache, 1, ids(1, 2, 3, 4))
    third = begin(cache, 2, ids(1, 2, 8))
    assert rows_of(cache, second)[:3] == rows_of(cache, first)[:3]
    assert rows_of(cache, second)[3] != rows_of(cache, first)[3]
    assert rows_of(cache, third)[:2] == rows_of(cache, first)[:2]
    assert (cache.computed[second], cache.computed[third]) == (3, 2)
    assert cache.pool.num_free == 20 - 4 - 1 - 1
    for member in range(3):
        cache.release(0, member)
    assert cache.pool.num_free == 20 and not cache.pool.references.any()


def test_the_prompt_stays_until_the_groups_last_member_goes():
    cache = KVTables(20)
    compute(cache, begin(cache, 0, ids(1, 2, 3, 4)))
    compute(cache, begin(cache, 1, ids(1, 2, 3, 4)))
    cache.release(0, 0)
    late = begin(cache, 2, ids(1, 2, 3, 4))
    assert cache.computed[late] == 3
    cache.release(0, 1)
    cache.release(0, 2)
    assert cache.pool.num_free == 20
    assert cache.computed[begin(cache, 3, ids(1, 2, 3, 4))] == 0


def test_nothing_is_shared_between_versions_or_groups():
    cache = KVTables(20)
    compute(cache, begin(cache, 0, ids(1, 2, 3)))
    assert cache.computed[begin(cache, 1, ids(1, 2, 3), version=1)] == 0
    assert cache.computed[begin(cache, 0, ids(1, 2, 3), group=1)] == 0


def test_a_new_version_starts_a_trajectory_from_nothing():
    cache = KVTables(20)
    seat = begin(cache, 0, ids(1, 2, 3))
    compute(cache, seat)
    cache.park(seat)
    assert begin(cache, 0, ids(1, 2, 3, 4), version=1) == seat
    assert cache.computed[seat] == 0
    assert cache.key(seat) == (1, 0, 0)
    assert cache.pool.num_free == 20 - 4  # the old version's prompt went with its last member


def test_a_borrower_waits_for_what_another_computes():
    cache = KVTables(20)
    first = begin(cache, 0, ids(1, 2, 3, 4))
    second = begin(cache, 1, ids(1, 2, 3, 4))
    assert second in cache.borrowed and compute(cache, second) == 0
    compute(cache, first)
    assert compute(cache, second) == 1 and second not in cache.borrowed


@pytest.mark.parametrize("how", ["pause", "release"])
def test_a_borrower_computes_what_its_lender_left_undone(how):
    cache = KVTables(20)
    first = begin(cache, 0, ids(1, 2, 3, 4))
    second = begin(cache, 1, ids(1, 2, 3, 4))
    third = begin(cache, 2, ids(1, 2, 3, 4))
    cache.pool.writer[cache.rows[first, :1]] = WRITTEN
    cache.computed[first] = 1
    cache.pause(first) if how == "pause" else cache.release(0, 0)
    assert (cache.pool.writer[cache.rows[second, 1:3]] == ORPHAN).all()
    assert compute(cache, third) == 3  # tokens 1 and 2 of the prompt, and its own last
    assert compute(cache, second) == 1
    for member in range(3):
        cache.release(0, member)
    assert cache.pool.num_free == 20


def test_idle_trajectories_are_evicted_least_recently_used_first():
    cache = KVTables(10)
    seats = []
    for group in range(3):
        seats.append(begin(cache, 0, ids(1, 2, 3), group=group))
        compute(cache, seats[-1])
        cache.park(seats[-1])
    cache.open(0, 0, 0, ids(1, 2, 3, 4), 6)  # used again, so group 1 is the oldest now
    new = begin(cache, 0, ids(7, 7), group=9)
    assert cache.allocated[seats + [new]].tolist() == [3, 0, 3, 2]
    assert (cache.holders() == cache.pool.references).all()


def test_eviction_takes_idle_ones_then_prompts_and_never_the_running():
    cache = KVTables(8)
    running = begin(cache, 0, ids(1, 2, 3), group=0)
    idle = begin(cache, 0, ids(4, 5, 6), group=1)
    compute(cache, idle)
    cache.park(idle)
    seat = cache.open(0, 2, 0, ids(1, 2, 3, 4, 5), 8)
    assert cache.start(seat)
    assert cache.allocated[idle] == 0 and cache.allocated[running] == 3
    assert cache.pool.num_free == 0
    other = cache.open(0, 3, 0, ids(1), 4)
    assert not cache.start(other) and cache.allocated[other] == 0
    assert (cache.holders() == cache.pool.references).all()


def test_a_start_without_room_evicts_nothing_in_vain():
    cache = KVTables(8)
    begin(cache, 0, ids(1, 2, 3, 4), group=0)
    idle = begin(cache, 0, ids(4, 5), group=1)
    cache.park(idle)
    seat = cache.open(0, 2, 0, ids(*range(7)), 9)
    assert not cache.start(seat)
    assert cache.allocated[idle] == 2


def test_a_start_without_room_keeps_what_the_trajectory_has():
    cache = KVTables(8)
    seat = begin(cache, 0, ids(1, 2, 3), group=0)
    compute(cache, seat)
    cache.park(seat)
    begin(cache, 0, ids(4, 5, 6), group=1)
    cache.open(0, 0, 0, ids(1, 2, 3, 4, 5, 6), 8)
    assert not cache.start(seat)
    assert cache.allocated[seat] == cache.computed[seat] == 3
    cache.release(1, 0)
    assert cache.start(seat) and cache.computed[seat] == 3


def test_headroom_is_left_free():
    cache = KVTables(8)
    seat = cache.open(0, 0, 0, ids(1, 2, 3), 5)
    assert not cache.start(seat, headroom=6)
    assert cache.start(seat, headroom=5)


def test_tables_grow_and_keep_what_they_hold():
    cache = KVTables(1000, num_seats=2, num_positions=4)
    seats = [begin(cache, member, np.arange(member, member + 20, dtype=np.int32)) for member in range(9)]
    assert len(set(seats)) == 9
    for member, seat in enumerate(seats):
        assert cache.tokens[seat, :20].tolist() == list(range(member, member + 20))
        assert cache.key(seat) == (0, 0, member)
    assert (cache.holders() == cache.pool.references).all()


def test_rows_beyond_a_sequence_are_row_zero():
    cache = KVTables(20)
    seat = begin(cache, 0, ids(1, 2, 3, 4))
    compute(cache, seat)
    cache.park(seat)
    begin(cache, 0, ids(1, 9))
    assert not cache.rows[seat, 2:].any()
    cache.release(0, 0)
    assert not cache.rows.any()


def test_dropping_a_version_frees_its_prompts_and_keeps_what_a_newer_one_may_build_on():
    cache = KVTables(20)
    seat = begin(cache, 0, ids(1, 2, 3))
    compute(cache, seat)
    cache.park(seat)
    begin(cache, 1, ids(1, 2, 9))
    assert cache.pool.num_free == 16
    cache.release(0, 1)
    cache.drop_version(0)
    assert cache.pool.num_free == 17 and cache.pool.references.max() == 1
    assert cache.make_room(20)  # what idles can still be evicted
    cache.release(0, 0)
    assert cache.pool.num_free == 20


def go_on(cache, seat, context, version, max_age):
    """The trajectory's next request, computed to its end."""
    cache.park(seat)
    _, group, member = cache.key(seat)
    assert cache.open(version, group, member, ids(*context), len(context) + 2, max_age) == seat
    assert cache.start(seat)
    kept = int(cache.computed[seat])
    compute(cache, seat)
    return kept, int(cache.anchor[seat])


def test_a_newer_version_builds_on_kv_within_its_age_and_from_nothing_beyond():
    cache = KVTables(40)
    seat = begin(cache, 0, ids(1, 2, 3), version=4)
    compute(cache, seat)
    assert go_on(cache, seat, (1, 2, 3, 4), 5, max_age=2) == (3, 4)
    assert go_on(cache, seat, (1, 2, 3, 4, 5, 6), 6, max_age=2) == (4, 4)
    assert go_on(cache, seat, (1, 2, 7, 7), 6, max_age=2) == (2, 4)  # a context that turns elsewhere
    assert go_on(cache, seat, (1, 2, 7, 7, 8), 7, max_age=2) == (0, 7)
    assert go_on(cache, seat, (1, 2, 7, 7, 8), 7, max_age=0) == (4, 7)
    assert go_on(cache, seat, (1, 2, 7, 7, 8), 6, max_age=2) == (0, 6)  # never over KV of a newer version
    cache.release(0, 0)
    assert cache.pool.num_free == 40


def test_evicted_kv_is_computed_under_the_version_that_comes_next():
    cache = KVTables(8)
    seat = begin(cache, 0, ids(1, 2, 3), version=4)
    compute(cache, seat)
    cache.park(seat)
    assert cache.make_room(8)
    assert go_on(cache, seat, (1, 2, 3, 4), 5, max_age=3) == (0, 5)


def test_a_prompt_is_shared_under_its_own_version_only():
    cache = KVTables(40)
    old, new = begin(cache, 0, ids(1, 2, 3, 4), version=4), begin(cache, 1, ids(1, 2, 3, 4), version=5)
    compute(cache, old)
    compute(cache, new)
    late = begin(cache, 2, ids(1, 2, 3, 4), version=5)
    assert cache.rows[late, :3].tolist() == cache.rows[new, :3].tolist() and cache.anchor[late] == 5
    # More of the prompt under version 5 than is left of what version 4 has computed: it is all of version 5 then.
    assert go_on(cache, old, (1, 9), 5, max_age=1) == (1, 4)
    assert go_on(cache, old, (1, 2, 3, 4, 5), 5, max_age=1) == (4, 5)
    for member in range(3):
        cache.release(0, member)
    assert cache.pool.num_free == 40


def test_releasing_an_unknown_trajectory_is_harmless():
    assert KVTables(4).release(3, 1) is None
