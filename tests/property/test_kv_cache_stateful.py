"""The KV cache against a slow oracle: each row that counts as computed holds the KV of exactly that context, computed
by versions that were allowed to.

The oracle's "KV" of a token is (version, all tokens up to it). Random requests, passes, evictions, take-backs and
releases run over a small pool; whatever they do, a row is held by whom the tables say, and none leaks.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.generation.kv_cache import WRITTEN, KVTables

NUM_ROWS = 16
MOST_TOKENS = 10


class KVCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = KVTables(NUM_ROWS, num_seats=2, num_positions=2)
        self.content: dict[int, tuple] = {}
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.max_age: dict[int, int] = {}  # seat -> that of its last request

    def live(self, seat: int | None) -> bool:
        return seat in self.waiting or seat in self.running

    def idle(self) -> list[int]:
        """The trajectories that are between two requests."""
        return [seat for seat in self.cache._seat_of.values() if not self.live(seat)]

    @rule(
        group=st.integers(-1, 0),
        members=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
        version=st.integers(0, 1),
        num_common=st.integers(0, MOST_TOKENS - 2),
        own=st.lists(st.integers(0, 1), max_size=2),
    )
    def group_arrives(self, group: int, members: list[int], version: int, num_common: int, own: list[int]) -> None:
        """First requests of some members, all with one prompt, which other groups and versions begin with as well."""
        for member in members:
            self.request(group, member, version, ([0] * num_common + own)[: MOST_TOKENS - 1] or [1])

    @precondition(lambda self: self.idle())
    @rule(
        which=st.integers(0, 100),
        more=st.lists(st.integers(0, 1), max_size=3),
        keeps=st.integers(0, MOST_TOKENS),
        newer=st.integers(0, 2),
        max_age=st.integers(0, 2),
    )
    def next_turn(self, which: int, more: list[int], keeps: int, newer: int, max_age: int) -> None:
        """A trajectory between two requests asks for the next one: what it had, or a part of that, and some more; under
        its version or a newer one.
        """
        idle = self.idle()
        seat = idle[which % len(idle)]
        version, group, member = self.cache.key(seat)
        had = self.cache.tokens[seat, : self.cache.length[seat]].tolist()[: max(keeps, 1)]
        kept = self.cache.allocated[seat] > 0 and 0 <= version + newer - self.cache.anchor[seat] <= max_age
        self.request(group, member, version + newer, (had + more)[: MOST_TOKENS - 1], max_age, builds_on=kept)

    @rule(group=st.integers(-1, 0), member=st.integers(0, 2), version=st.integers(0, 1))
    def changes_version(self, group: int, member: int, version: int) -> None:
        seat = self.cache.seat_of(group, member)
        if seat is not None:
            self.request(group, member, version, self.cache.tokens[seat, : self.cache.length[seat]].tolist()[:9])

    def request(
        self,
        group: int,
        member: int,
        version: int,
        tokens: list[int],
        max_age: int = 0,
        builds_on: bool | None = None,
    ) -> None:
        if self.live(self.cache.seat_of(group, member)):
            return
        seat = self.cache.open(version, group, member, np.array(tokens, dtype=np.int32), MOST_TOKENS, max_age)
        assert self.cache.tokens[seat, : len(tokens)].tolist() == tokens
        assert builds_on is None or builds_on == (self.cache.allocated[seat] > 0) or len(tokens) == 1
        self.max_age[seat] = max_age
        self.waiting.append(seat)
        self.start(0)

    @precondition(lambda self: self.waiting)
    @rule(headroom=st.integers(0, 3))
    def start_waiting(self, headroom: int) -> None:
        self.start(headroom)

    def start(self, headroom: int) -> None:
        seat = self.waiting[0]
        nothing_runs = not self.running
        started = self.cache.start(seat, 0 if nothing_runs else headroom)
        assert started or not nothing_runs, "alone, a request that fits must start"
        if started:
            self.running.append(self.waiting.pop(0))
            assert self.cache.computed[seat] < self.cache.length[seat] == self.cache.allocated[seat]
            assert nothing_runs or self.cache.pool.num_free >= headroom

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), most=st.integers(1, MOST_TOKENS))
    def compute_some(self, which: int, most: int) -> None:
        self.compute(self.running[which % len(self.running)], most)

    def compute(self, seat: int, most: int) -> None:
        cache = self.cache
        if cache.computed[seat] == cache.length[seat]:
            return  # waits for its token to be sampled
        end = cache.frontier(seat) if seat in cache.borrowed else int(cache.length[seat])
        begin = int(cache.computed[seat])
        assert begin < cache.length[seat], "the last token is always computed: its logits are wanted"
        end = min(end, begin + most)
        version = cache.key(seat)[0]
        for position in range(begin, end):
            row = int(cache.rows[seat, position])
            self.content[row] = (version, *cache.tokens[seat, : position + 1].tolist())
        cache.pool.writer[cache.rows[seat, begin:end]] = WRITTEN
        cache.computed[seat] = end

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), token=st.integers(0, 1), ends=st.booleans())
    def sample_one(self, which: int, token: int, ends: bool) -> None:
        self.sample(self.running[which % len(self.running)], token, ends)

    @precondition(lambda self: self.running)
    @rule()
    def finish_all(self) -> None:
        """What is left of all that can go on, in one step: by single ones hardly any would live to its next turn."""
        for seat in list(self.running):
            self.compute(seat, MOST_TOKENS)
            self.sample(seat, token=0, ends=True)

    def sample(self, seat: int, token: int, ends: bool) -> None:
        cache = self.cache
        length = int(cache.length[seat])
        if cache.computed[seat] < length:
            return
        ends = ends or length + 1 == MOST_TOKENS
        cache.tokens[seat, length] = token
        cache.length[seat] = length + 1
        if ends:
            self.running.remove(seat)
            cache.park(seat)
        elif cache.make_room(1):
            cache.extend(np.array([seat]))
        else:
            self.take_back(seat)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def take_back_one(self, which: int) -> None:
        self.take_back(self.running[which % len(self.running)])

    def take_back(self, seat: int) -> None:
        self.running.remove(seat)
        self.cache.pause(seat)
        self.waiting.insert(0, seat)

    @rule(group=st.integers(-1, 0), member=st.integers(0, 2))
    def release(self, group: int, member: int) -> None:
        seat = self.cache.release(group, member)
        if seat in self.waiting:
            self.waiting.remove(seat)
        if seat in self.running:
            self.running.remove(seat)

    @rule(version=st.integers(0, 1))
    def drop_version(self, version: int) -> None:
        if not any(self.cache.key(seat)[0] == version for seat in self.running):
            self.cache.drop_version(version)

    @rule(count=st.integers(0, NUM_ROWS))
    def make_room(self, count: int) -> None:
        free = self.cache.pool.num_free
        if self.cache.make_room(count):
            assert self.cache.pool.num_free >= count
        else:
            assert self.cache.pool.num_free == free

    @invariant()
    def rows_are_held_by_whom_the_tables_say(self) -> None:
        pool = self.cache.pool
        assert (self.cache.holders() == pool.references).all()
        assert pool.references[0] == 0
        free = pool._free[: pool.num_free].tolist()
        assert sorted(free + np.flatnonzero(pool.references).tolist()) == list(range(1, NUM_ROWS + 1))

    @invariant()
    def computed_rows_hold_their_context(self) -> None:
        cache = self.cache
        for seat in cache._seat_of.values():
            version, length = cache.key(seat)[0], int(cache.length[seat])
            computed, allocated = int(cache.computed[seat]), int(cache.allocated[seat])
            assert 0 <= computed <= allocated <= length
            assert not cache.rows[seat, allocated:].any()
            tokens, oldest = cache.tokens[seat].tolist(), 0
            for position in range(computed):
                by, *context = self.content[int(cache.rows[seat, position])]
                assert context == tokens[: position + 1]
                assert oldest <= by <= version
                oldest = by
            if computed:
                anchor = self.content[int(cache.rows[seat, 0])][0]
                assert cache.anchor[seat] == anchor
                assert version - anchor <= self.max_age[seat]
            if not self.live(seat):
                assert computed == allocated

    @invariant()
    def someone_can_always_go_on(self) -> None:
        """No circle of borrowers that wait for each other."""
        cache = self.cache
        behind = [seat for seat in self.running if cache.computed[seat] < cache.allocated[seat]]
        for version in {cache.key(seat)[0] for seat in behind}:
            of_version = [seat for seat in behind if cache.key(seat)[0] == version]
            assert any(seat not in cache.borrowed or cache.frontier(seat) > cache.computed[seat] for seat in of_version)

    def teardown(self) -> None:
        for group in (-1, 0):
            for member in range(3):
                self.cache.release(group, member)
        assert self.cache.pool.num_free == NUM_ROWS
        assert not self.cache.pool.references.any() and not self.cache.rows.any()


KVCacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestKVCache = KVCacheMachine.TestCase
