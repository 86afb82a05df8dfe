"""Who holds which row of the KV pool: pure bookkeeping in numpy, no tensors.

The pool has one row per token. A trajectory has a *seat*: a row of the tables below, from its first request to its
release. Its KV rows are counted references, shared with the other members of its group over their common prompt: a
prompt belongs to one policy version. A later request may name a newer version and go on over what older ones computed;
the oldest of them is the *anchor* of the KV, and as KV grows at its end only, that is who computed its first row.
Memory short, the KV of trajectories between two requests goes first (least recently used), then the prompts kept for
groups; both can be computed again. Row 0 is never given out: tables are padded with it, and its KV stays zero.
"""

from collections.abc import Iterable

import numpy as np

WRITTEN = -1  # RowPool.writer: the row's KV is computed
ORPHAN = -2  # RowPool.writer: the sequence that was to compute it has gone


class RowPool:
    """Reference counts of the rows 1 … num_rows, and who computes each."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_free = num_rows
        self.references = np.zeros(num_rows + 1, dtype=np.int32)
        self.writer = np.full(num_rows + 1, WRITTEN, dtype=np.int32)
        self._free = np.arange(num_rows, 0, -1, dtype=np.int64)  # a stack: its first num_free entries

    def take(self, count: int, writer: int | np.ndarray) -> np.ndarray:
        """`count` free rows, int64, ascending while the pool is fresh; the caller has seen that there are so many."""
        assert count <= self.num_free, f"{count} KV rows taken, {self.num_free} are free"
        rows = self._free[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self.references[rows] = 1
        self.writer[rows] = writer
        return rows

    def share(self, rows: np.ndarray) -> None:
        """One more holder for each of `rows` (distinct)."""
        self.references[rows] += 1

    def drop(self, rows: np.ndarray) -> np.ndarray:
        """One holder less for each of `rows` (distinct); returns those that others still hold."""
        left = self.references[rows] - 1
        assert len(left) == 0 or left.min() >= 0, "a KV row was dropped more often than it was held"
        self.references[rows] = left
        freed = rows[left == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)
        return rows[left > 0]


class _Prompt:
    """The rows of a group's first context, held for its other members."""

    __slots__ = ("rows", "tokens")

    def __init__(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        self.tokens = tokens
        self.rows = rows


class KVTables:
    """The tables of all trajectories: S seats, C positions, both grown by doubling (untouched memory costs nothing).

    tokens int32 [S, C], logprobs float32 [S, C] and rows int64 [S, C] by position; per seat `length` (tokens known),
    `allocated` (leading tokens with a row) and `computed` (leading tokens whose KV is written): computed <= allocated
    <= length; and `anchor`, the oldest version in its rows (while it has any). Growth replaces the arrays: don't keep
    them across `open`.
    """

    def __init__(self, num_rows: int, num_seats: int = 64, num_positions: int = 64) -> None:
        self.pool = RowPool(num_rows)
        self.tokens = np.zeros((num_seats, num_positions), dtype=np.int32)
        self.logprobs = np.zeros((num_seats, num_positions), dtype=np.float32)
        self.rows = np.zeros((num_seats, num_positions), dtype=np.int64)
        self.length = np.zeros(num_seats, dtype=np.int64)
        self.allocated = np.zeros(num_seats, dtype=np.int64)
        self.computed = np.zeros(num_seats, dtype=np.int64)
        self.anchor = np.zeros(num_seats, dtype=np.int64)
        self.borrowed: dict[int, int] = {}  # seat -> leading rows that another sequence has still to compute
        self._keys: list[tuple[int, int, int] | None] = [None] * num_seats  # (version, group, member)
        self._is_new = np.zeros(num_seats, dtype=bool)  # has never been started
        self._seat_of: dict[tuple[int, int], int] = {}
        self._free_seats = list(range(num_seats - 1, -1, -1))
        self._idle: dict[int, None] = {}  # seats with rows that nothing computes on, least recently used first
        self._prompts: dict[tuple[int, int], _Prompt] = {}  # by (version, group), oldest first
        self._num_members: dict[tuple[int, int], int] = {}

    @property
    def num_seats(self) -> int:
        return len(self.length)

    @property
    def num_trajectories(self) -> int:
        return len(self._seat_of)

    def seat_of(self, group: int, member: int) -> int | None:
        return self._seat_of.get((group, member))

    def key(self, seat: int) -> tuple[int, int, int]:
        """(version, group, member) of a seat in use."""
        key = self._keys[seat]
        assert key is not None, f"seat {seat} belongs to no trajectory"
        return key

    def open(
        self, version: int, group: int, member: int, context: np.ndarray, num_positions: int, max_age: int = 0
    ) -> int:
        """A trajectory's next request: note its whole context (int32) and return its seat.

        Keeps the KV that fits: that of the longest common prefix with what the trajectory has, unless its anchor is
        more than `max_age` versions behind `version`, or a version newer than that has computed some of it. The last
        token's never is kept, as its logits are wanted. `num_positions` is how long the sequence may grow.
        """
        seat = self._seat_of.get((group, member))
        if seat is None:
            seat = self._new_seat(version, group, member)
        else:
            newest = self.key(seat)[0]
            if version < newest or version - self.anchor[seat] > max_age:
                self.pause(seat)
            if version != newest:
                self._leave_group(seat)
                self._join_group(seat, version, group, member)
        if num_positions > self.tokens.shape[1]:
            self._grow_positions(num_positions)
        kept, have = 0, int(self.allocated[seat])
        if have:
            kept = common_prefix(self.tokens[seat, :have], context[:-1])
            self._cut(seat, kept)
            if kept:
                self._idle.pop(seat, None)
                self._idle[seat] = None
        self.tokens[seat, kept : len(context)] = context[kept:]
        self.length[seat] = len(context)
        return seat

    def start(self, seat: int, headroom: int = 0) -> bool:
        """Give rows to all tokens of a seat, so that its request may run; False, and nothing held more, without room.

        Rows come from what the seat kept, else from the group's prompt, else from the pool, after evictions if need be.
        `headroom` rows must then be left free. Afterwards `computed` tells how many leading tokens need no work.
        """
        key = self.key(seat)
        length, have = int(self.length[seat]), int(self.allocated[seat])
        prompt = self._prompts.get(key[:2])
        shared = 0
        if prompt is not None and have < length - 1:
            shared = common_prefix(prompt.tokens, self.tokens[seat, : length - 1])
            if shared > have:
                self._borrow(seat, prompt.rows[:shared])
                have = shared
        need = length - have
        if self.pool.num_free < need + headroom and not self.make_room(need + headroom, spare=seat):
            if seat not in self._idle:
                self.pause(seat)  # what was borrowed a moment ago
            return False
        if not self.allocated[seat]:
            self.anchor[seat] = key[0]
        if need:
            self.rows[seat, have:length] = self.pool.take(need, seat)
            self.allocated[seat] = length
        self._idle.pop(seat, None)
        if self._is_new[seat]:
            self._is_new[seat] = False
            if prompt is None:
                rows = self.rows[seat, :length].copy()
                self.pool.share(rows)
                self._prompts[key[:2]] = _Prompt(self.tokens[seat, :length].copy(), rows)
        return True

    def extend(self, seats: np.ndarray) -> None:
        """A row for the next token of each seat; the caller has made room."""
        places = self.allocated[seats]
        self.rows[seats, places] = self.pool.take(len(seats), seats)
        self.allocated[seats] = places + 1

    def frontier(self, seat: int) -> int:
        """How far a borrower may compute now: its length, or `computed` while another sequence computes what it
        borrowed.

        Advances `computed` over what others have written since. Rows whose writer has gone become the borrower's to
        compute.
        """
        shared, begin = self.borrowed[seat], int(self.computed[seat])
        rows = self.rows[seat, begin:shared]
        writers = self.pool.writer[rows]
        num_written = _leading(writers == WRITTEN)
        begin += num_written
        self.computed[seat] = begin
        if begin >= shared:
            del self.borrowed[seat]
            return int(self.length[seat])
        rows, writers = rows[num_written:], writers[num_written:]
        if writers[0] == ORPHAN:
            is_orphan = writers == ORPHAN
            self.pool.writer[rows[is_orphan]] = seat
            writers[is_orphan] = seat
        num_own = _leading(writers == seat)
        return int(self.length[seat]) if num_own == len(rows) else begin + num_own

    def park(self, seat: int) -> None:
        """The seat's request is over: its KV waits for the trajectory's next one and may be evicted."""
        self._idle[seat] = None

    def pause(self, seat: int) -> None:
        """Give all KV of a seat back; it can be started again at any time, and is then computed again."""
        self._idle.pop(seat, None)
        self._cut(seat, 0)

    def release(self, group: int, member: int) -> int | None:
        """The trajectory has ended: forget it; returns the seat it had, if any."""
        seat = self._seat_of.pop((group, member), None)
        if seat is None:
            return None
        self.pause(seat)
        self._leave_group(seat)
        self._keys[seat] = None
        self._free_seats.append(seat)
        return seat

    def drop_version(self, version: int) -> None:
        """Nobody will start under `version` again: its prompts go. What a trajectory has is its own until it ends."""
        for key in [key for key in self._prompts if key[0] == version]:
            self._drop_prompt(key)

    def make_room(self, count: int, spare: int = -1) -> bool:
        """Evict until `count` rows are free: idle trajectories (but `spare`), the least recently used first, then
        prompts.

        A prompt goes with the last trajectory that shares it. False, and nothing is evicted, if all that would not do.
        """
        pool = self.pool
        if pool.num_free >= count:
            return True
        idle = [seat for seat in self._idle if seat != spare]
        counts = self._count_holders(idle, self._prompts.values())
        if pool.num_free + int(((counts > 0) & (counts == pool.references)).sum()) < count:
            return False
        for seat in idle:
            self.pause(seat)
            key = self.key(seat)[:2]
            prompt = self._prompts.get(key)
            if prompt is not None and pool.references[prompt.rows[0]] == 1:
                self._drop_prompt(key)
            if pool.num_free >= count:
                return True
        while pool.num_free < count:
            self._drop_prompt(next(iter(self._prompts)))
        return True

    def holders(self) -> np.ndarray:
        """References of each row counted afresh from the tables, int32 [num_rows + 1]; must equal `pool.references`,
        as tests see.
        """
        return self._count_holders(self._seat_of.values(), self._prompts.values())

    def _count_holders(self, seats: Iterable[int], prompts: Iterable[_Prompt]) -> np.ndarray:
        counts = np.zeros_like(self.pool.references)
        for seat in seats:
            counts[self.rows[seat, : self.allocated[seat]]] += 1
        for prompt in prompts:
            counts[prompt.rows] += 1
        return counts

    def _drop_prompt(self, key: tuple[int, int]) -> None:
        self.pool.drop(self._prompts.pop(key).rows)

    def _borrow(self, seat: int, rows: np.ndarray) -> None:
        """Replace a seat's rows by those of its group's prompt, which are all of the seat's own version."""
        num = len(rows)
        self.pool.share(rows)
        self.pause(seat)
        self.anchor[seat] = self.key(seat)[0]
        self.rows[seat, :num] = rows
        self.allocated[seat] = num
        num_written = _leading(self.pool.writer[rows] == WRITTEN)
        self.computed[seat] = num_written
        if num_written < num:
            self.borrowed[seat] = num

    def _cut(self, seat: int, keep: int) -> None:
        """Keep the first `keep` rows of a seat only."""
        have = int(self.allocated[seat])
        if keep >= have:
            return
        rows = self.rows[seat, keep:have]
        remaining = self.pool.drop(rows)
        if self.computed[seat] < have and len(remaining):
            orphans = remaining[self.pool.writer[remaining] == seat]
            self.pool.writer[orphans] = ORPHAN
        rows[:] = 0
        self.allocated[seat] = keep
        self.computed[seat] = min(keep, int(self.computed[seat]))
        self.borrowed.pop(seat, None)
        if keep == 0:
            self._idle.pop(seat, None)

    def _new_seat(self, version: int, group: int, member: int) -> int:
        if not self._free_seats:
            self._grow_seats()
        seat = self._free_seats.pop()
        self._seat_of[group, member] = seat
        self._is_new[seat] = True
        self._join_group(seat, version, group, member)
        return seat

    def _join_group(self, seat: int, version: int, group: int, member: int) -> None:
        self._keys[seat] = (version, group, member)
        self._num_members[version, group] = self._num_members.get((version, group), 0) + 1

    def _leave_group(self, seat: int) -> None:
        """The group's prompt goes with its last member."""
        key = self.key(seat)[:2]
        self._num_members[key] -= 1
        if not self._num_members[key]:
            del self._num_members[key]
            if key in self._prompts:
                self._drop_prompt(key)

    def _grow_seats(self) -> None:
        old = self.num_seats
        for name in ("tokens", "logprobs", "rows", "length", "allocated", "computed", "anchor", "_is_new"):
            table = getattr(self, name)
            grown = np.zeros((2 * old, *table.shape[1:]), dtype=table.dtype)
            grown[:old] = table
            setattr(self, name, grown)
        self._keys += [None] * old
        self._free_seats += range(2 * old - 1, old - 1, -1)

    def _grow_positions(self, num_positions: int) -> None:
        """Copies only what is in use: a long context must not make real memory of the other seats' empty tails."""
        width = self.tokens.shape[1]
        while width < num_positions:
            width *= 2
        for name in ("tokens", "logprobs", "rows"):
            table = getattr(self, name)
            grown = np.zeros((len(table), width), dtype=table.dtype)
            for seat in self._seat_of.values():
                used = self.length[seat]
                grown[seat, :used] = table[seat, :used]
            setattr(self, name, grown)


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the longest common prefix of two token arrays."""
    num = min(len(first), len(second))
    return _leading(first[:num] == second[:num])


def _leading(flags: np.ndarray) -> int:
    """How many leading entries of a bool array are True."""
    if not len(flags):
        return 0
    first_false = int(flags.argmin())
    return len(flags) if flags[first_false] else first_false
