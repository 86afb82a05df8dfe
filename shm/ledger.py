"""The version ledger: committed version, weight slots, leases, reservations, and a row per worker, in one block.

Memory: aligned int64 words, each with exactly one writer, no table with two (learner: policy version, slots;
supervisor: leases, reservations; each worker: its row). No locks, so a killed process can never leave one held. Words
are touched only through int64 views: `struct.pack_into` can be seen half done.

A record of several words ends with a check word, a hash of the words before it; a reader that finds it wrong reads
again. (A sequence counter would not do: Python has no memory fences and ARM reorders.) A word alone needs none.
Nothing that must be right rests on seeing a word early: a reader acts on a message that was sent after the write.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import TypeVar

from shm.errors import LedgerError

_MAGIC = 0x4845_4144_5741_5931  # "HEADWAY1"
_LAYOUT = 2  # raise it with any change of the words below
_WORD = 8
_LINE = 8  # words in a cache line: tables of different writers don't share one

_HEADER_WORDS = 7  # magic, layout, run id, slots, reservations, workers, check
_SLOT_WORDS = 4  # version, state, checksum, check
# pid, incarnation, check; then a word each for itself: heartbeat, activity, counter, nanoseconds busy, waiting, idle
_WORKER_WORDS = 9
_WORKER_STRIDE = 2 * _LINE

# A torn record is whole again within microseconds, unless its writer lost the processor in between: then sleep.
_SPINS = 50
_NAPS = 1000
_NAP_SECONDS = 0.001


Enumerated = TypeVar("Enumerated", bound=IntEnum)


class State(IntEnum):
    """What a weight slot holds: nothing yet, weights being copied, or the weights of its version."""

    EMPTY = 0
    WRITING = 1
    READY = 2


class Activity(IntEnum):
    """What a worker is doing, for people and for the search for the culprit of a wait."""

    STARTING = 0
    IDLE = 1  # nothing to do
    WAITING = 2  # for another process
    BUSY = 3
    PUBLISHING = 4
    STOPPING = 5


@dataclass(frozen=True, slots=True)
class SlotState:
    """version: policy version, -1 while empty. checksum: of the weights in checksum mode, else 0."""

    version: int
    state: State
    checksum: int


# Where the time of an activity is booked: 0 busy, 1 waiting, 2 idle.
_ACCOUNTS = {
    Activity.STARTING: 0,
    Activity.IDLE: 2,
    Activity.WAITING: 1,
    Activity.BUSY: 0,
    Activity.PUBLISHING: 0,
    Activity.STOPPING: 0,
}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """heartbeat_ns: CLOCK_MONOTONIC, which all processes of a machine share; 0 before the first beat.

    busy_ns, waiting_ns, idle_ns: time since the worker's first beat, up to its last one.
    """

    pid: int
    incarnation: int
    heartbeat_ns: int
    activity: Activity
    counter: int
    busy_ns: int
    waiting_ns: int
    idle_ns: int

    def times_ns(self, now_ns: int) -> tuple[int, int, int]:
        """(busy, waiting, idle) up to `now_ns`: what has passed since the last beat is time of the activity now."""
        times = [self.busy_ns, self.waiting_ns, self.idle_ns]
        if self.heartbeat_ns:
            times[_ACCOUNTS[self.activity]] += max(0, now_ns - self.heartbeat_ns)
        return tuple(times)


@dataclass(frozen=True, slots=True)
class LedgerShape:
    """How many rows each table has; known before the block is made, the same for all who attach.

    num_reservations: room for every group that may be owed at once, `(1 + max_staleness) * groups_per_update`.
    """

    num_slots: int
    num_reservations: int
    num_workers: int

    def __post_init__(self) -> None:
        if min(self.num_slots, self.num_reservations, self.num_workers) < 0:
            raise LedgerError(f"A ledger's tables can't have negative sizes ({self}).")

    @property
    def version_word(self) -> int:
        return _LINE

    @property
    def slots_word(self) -> int:
        return self.version_word + _LINE

    @property
    def leases_word(self) -> int:
        return _round_up(self.slots_word + self.num_slots * _SLOT_WORDS)

    @property
    def reservations_word(self) -> int:
        return _round_up(self.leases_word + self.num_slots)

    @property
    def reservations_words(self) -> int:
        return 2 + 2 * self.num_reservations + 1  # epoch, count, (group, admitted) pairs, check

    @property
    def workers_word(self) -> int:
        return _round_up(self.reservations_word + self.reservations_words)

    @property
    def num_bytes(self) -> int:
        return (self.workers_word + self.num_workers * _WORKER_STRIDE) * _WORD

    def to_fields(self) -> dict[str, int]:
        """Plain values for a message."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, int]) -> "LedgerShape":
        """Inverse of `to_fields`."""
        try:
            return cls(**fields)
        except TypeError as error:
            raise LedgerError(f"Not a ledger's shape: {fields!r} ({error}).") from error


class Ledger:
    """One process's hands on the ledger. Its maker calls `format` once, everybody else `attach`.

    view: bytes of the whole block (read-only will do for a reader). Reads of records raise LedgerError when one stays
    torn for about a second, that is, when its writer was killed in the middle of it.
    """

    def __init__(self, view: memoryview, shape: LedgerShape) -> None:
        if len(view) < shape.num_bytes:
            raise LedgerError(f"A ledger of {shape} needs {shape.num_bytes} bytes; the block has {len(view)}.")
        self.shape = shape
        self._words = view[: shape.num_bytes].cast("q")

    def format(self, run_id: int) -> None:
        """Write an empty ledger: version 0, slots EMPTY, no lease, no reservation (epoch 0), no worker."""
        shape = self.shape
        self._words[:] = memoryview(array("q", [0] * len(self._words)))
        for slot in range(shape.num_slots):
            self.write_slot(slot, -1, State.EMPTY)
        self.write_reservations(0, [])
        for index in range(shape.num_workers):
            self._write(self.shape.workers_word + index * _WORKER_STRIDE, (0, -1))
        sizes = (shape.num_slots, shape.num_reservations, shape.num_workers)
        self._write(0, (_MAGIC, _LAYOUT, run_id, *sizes))

    def attach(self, run_id: int | None = None) -> int:
        """Check that this is a ledger of this layout and shape (and run, if given); return its run id."""
        magic, layout = self._words[0], self._words[1]
        if magic != _MAGIC or layout != _LAYOUT:
            raise LedgerError(f"The block is no ledger of layout {_LAYOUT} (magic {magic:#x}, layout {layout}).")
        _, _, found_run, *sizes = self._read(0, _HEADER_WORDS, "header")
        if LedgerShape(*sizes) != self.shape:
            raise LedgerError(f"The ledger was made as {LedgerShape(*sizes)}, not as {self.shape}.")
        if run_id is not None and found_run != run_id:
            raise LedgerError(f"The ledger belongs to run {found_run}, not to run {run_id}.")
        return found_run

    # Learner

    def write_policy_version(self, version: int) -> None:
        """Commit a version: its slot is READY. The answer `published` is sent after this."""
        self._words[self.shape.version_word] = version

    def write_slot(self, slot: int, version: int, state: State, checksum: int = 0) -> None:
        """Say what a slot holds; WRITING before the first byte is copied, READY after the last one is there."""
        self._write(self._slot_word(slot), (version, state, checksum))

    # Supervisor

    def write_lease(self, slot: int, count: int) -> None:
        """How many hold the slot; the learner rewrites only a slot that nobody does."""
        self._words[self._lease_word(slot)] = count

    def write_reservations(self, epoch: int, owed: Sequence[tuple[int, int]]) -> None:
        """Replace the whole table: (group, admitted version) of every group owed training. Epochs only grow."""
        room = self.shape.num_reservations
        if len(owed) > room:
            raise LedgerError(f"{len(owed)} groups are owed training, but the ledger has room for {room} reservations.")
        words = [epoch, len(owed)]
        for group, admitted in owed:
            words += (group, admitted)
        words += [-1] * (2 * (room - len(owed)))
        self._write(self.shape.reservations_word, words)

    # Everybody

    def policy_version(self) -> int:
        """The committed version."""
        return self._words[self.shape.version_word]

    def slot(self, slot: int) -> SlotState:
        version, state, checksum = self._read(self._slot_word(slot), _SLOT_WORDS, f"slot {slot}")
        return SlotState(version, _known(State, state), checksum)

    def read_lease(self, slot: int) -> int:
        return self._words[self._lease_word(slot)]

    def reservations(self, min_epoch: int = 0) -> tuple[int, list[tuple[int, int]]]:
        """(epoch, [(group, admitted version), …]). LedgerError when the table is older than `min_epoch`.

        No wait for a newer one: the message that names an epoch is sent after the table was written.
        """
        shape = self.shape
        epoch, count, *words = self._read(shape.reservations_word, shape.reservations_words, "reservations")
        if epoch < min_epoch:
            raise LedgerError(
                f"The reservations are of epoch {epoch}; the step needs those of epoch {min_epoch} or later."
            )
        pairs = iter(words[: 2 * count])
        return epoch, list(zip(pairs, pairs, strict=True))

    def worker(self, index: int) -> "WorkerRow":
        """The row of worker `index`; only that worker writes to it."""
        if not 0 <= index < self.shape.num_workers:
            raise LedgerError(f"There is no worker {index}; the ledger has rows for {self.shape.num_workers}.")
        return WorkerRow(self, self.shape.workers_word + index * _WORKER_STRIDE, index)

    def _slot_word(self, slot: int) -> int:
        self._check_slot(slot)
        return self.shape.slots_word + slot * _SLOT_WORDS

    def _lease_word(self, slot: int) -> int:
        self._check_slot(slot)
        return self.shape.leases_word + slot

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.shape.num_slots:
            raise LedgerError(f"There is no weight slot {slot}; the ledger has {self.shape.num_slots}.")

    def _write(self, start: int, values: Sequence[int]) -> None:
        """Write a record and its check word at word `start`."""
        record = array("q", values)
        record.append(_check(record.tobytes(), start))
        self._words[start : start + len(record)] = memoryview(record)

    def _read(self, start: int, num_words: int, what: str) -> list[int]:
        """A whole record without its check word. Reads again while it is torn, for about a second."""
        for attempt in range(_SPINS + _NAPS):
            record = array("q", self._words[start : start + num_words].tobytes())
            check = record.pop()
            if check == _check(record.tobytes(), start):
                return record.tolist()
            if attempt >= _SPINS:
                time.sleep(_NAP_SECONDS)
        raise LedgerError(
            f"The ledger's {what} record stayed torn for {_SPINS + _NAPS} reads; its writer died while writing it, or "
            "the block is no ledger."
        )


class WorkerRow:
    """One worker's row: who it is (a record) and how it is (words, each for itself)."""

    def __init__(self, ledger: Ledger, start: int, index: int) -> None:
        self._ledger = ledger
        self._words = ledger._words
        self._start = start
        self._index = index

    def introduce(self, pid: int, incarnation: int) -> None:
        """Take the row over: a worker's first act. Its predecessor is dead and reaped by then; its times stay, and
        the time in which nobody lived is nobody's.
        """
        self._words[self._start + 3] = 0
        self.beat(Activity.STARTING, 0)
        self._ledger._write(self._start, (pid, incarnation))

    def beat(self, activity: int, counter: int | None = None) -> None:
        """Sign of life, now: `activity` begins, or goes on. counter: how much is done; None: as before."""
        words, start = self._words, self._start
        now, before = time.monotonic_ns(), words[start + 3]
        if before:
            words[start + 6 + _ACCOUNTS[words[start + 4]]] += now - before
        words[start + 4] = activity
        if counter is not None:
            words[start + 5] = counter
        words[start + 3] = now

    def read(self) -> WorkerState:
        """pid 0 and incarnation -1 before the worker has introduced itself."""
        return self._state(*self._ledger._read(self._start, 3, f"worker {self._index}"))

    @property
    def heartbeat_ns(self) -> int:
        """Of the latest sign of life, whoever gave it; also where the record is torn, of a worker that was killed or
        stopped while it introduced itself.
        """
        return self._words[self._start + 3]

    def times_ns(self, now_ns: int) -> tuple[int, int, int]:
        """Those of `WorkerState`, whoever booked them; likewise."""
        return self._state(0, -1).times_ns(now_ns)

    def _state(self, pid: int, incarnation: int) -> WorkerState:
        heartbeat_ns, activity, *rest = self._words[self._start + 3 : self._start + _WORKER_WORDS].tolist()
        return WorkerState(pid, incarnation, heartbeat_ns, _known(Activity, activity), *rest)


def _known(kind: type[Enumerated], value: int) -> Enumerated:
    try:
        return kind(value)
    except ValueError:
        raise LedgerError(f"The ledger names the {kind.__name__} {value}, which there is none of.") from None


def _check(content: bytes, salt: int) -> int:
    """Hash of a record's bytes; the salt, its place, keeps a record from passing for another's."""
    digest = blake2b(content, digest_size=_WORD, salt=salt.to_bytes(16, "little")).digest()
    return int.from_bytes(digest, "little", signed=True)


def _round_up(word: int) -> int:
    return -(-word // _LINE) * _LINE
