"""Who is in user code: words that a host writes as it goes, and that others read even when nothing else there moves.

Memory: a block of int64 words. First a worker's row as the ledger has it (who serves, its heartbeat, where its time
goes); then entries of four words: request (0: nobody), since_ns, method, thread. The first entry is the event loop's:
whose step it runs now. The others are claimed by what runs beside the loop: tools in threads, and calls that did not
end when they were cancelled. Each entry has one writer at a time; the request is written last and cleared first, and
whoever acts on an entry must have seen it twice.

`since_ns` is CLOCK_MONOTONIC, moved so that `now - since_ns` is what the call has used of its time (`call_time.py`).
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from shm.ledger import Activity, Ledger, LedgerShape

NUM_ENTRIES = 1024  # beside the loop at once; what runs beyond is not noted
METHODS = ("", "__init__", "reset", "on_turn", "reward", "on_truncated", "close", "snapshot", "restore")

_SHAPE = LedgerShape(num_slots=0, num_reservations=0, num_workers=1)
_ROW_WORDS = _SHAPE.num_bytes // 8
_HIGH = _ROW_WORDS  # so many entries beside the loop's have been in use
_LOOP = _ROW_WORDS + 8  # where the entries begin
_ENTRY_WORDS = 4
NUM_BYTES = (_LOOP + (1 + NUM_ENTRIES) * _ENTRY_WORDS) * 8


class Entry(NamedTuple):
    """Someone in user code. thread: the kernel's id of the thread that runs it, 0 if none does."""

    request: int
    since_ns: int
    method: str
    thread: int


class Look(NamedTuple):
    """What a host was at. heartbeat_ns: of its event loop, 0 before the first. loop: whose step it runs."""

    heartbeat_ns: int
    loop: Entry | None
    beside: list[Entry]

    @property
    def everyone(self) -> list[Entry]:
        """Who is in user code."""
        return [*([] if self.loop is None else [self.loop]), *self.beside]


class ActivityBoard:
    """Reader's and writer's hands on the words. view: NUM_BYTES writable bytes, zeroed; whoever made them calls
    `format`."""

    def __init__(self, view: memoryview) -> None:
        self._words = view[:NUM_BYTES].cast("q")
        self._ledger = Ledger(view, _SHAPE)
        self.row = self._ledger.worker(0)
        self._lock = threading.Lock()
        self._free: list[int] = []

    def format(self) -> None:
        """Nobody has served yet."""
        self._ledger.format(run_id=0)

    # The host's part.

    def introduce(self, pid: int, incarnation: int) -> None:
        """A new host on its loop's thread: nobody is in its user code."""
        self._words[_HIGH] = 0
        for start in range(_LOOP, len(self._words), _ENTRY_WORDS):
            self._words[start] = 0
        self._free.clear()
        self._words[_LOOP + 3] = threading.get_native_id()
        self.row.introduce(pid, incarnation)

    def enter_loop(self, request: int, since_ns: int, method: int) -> None:
        """The loop runs a step of this call."""
        words = self._words  # every step of every call comes here
        words[_LOOP + 1] = since_ns
        words[_LOOP + 2] = method
        words[_LOOP] = request
        self.row.beat(Activity.BUSY)

    def in_method(self, method: int) -> None:
        """What of the user's the step is in, from now on."""
        self._words[_LOOP + 2] = method

    def leave_loop(self, waiting: bool) -> None:
        """The step is over. waiting: calls are under way."""
        self._words[_LOOP] = 0
        self.row.beat(Activity.WAITING if waiting else Activity.IDLE)

    def claim(self, request: int, since_ns: int, method: int, thread: int) -> Callable[[], None]:
        """Note what runs beside the loop, until the function that this returns is called. From any thread."""
        with self._lock:
            number = self._free.pop() if self._free else self._words[_HIGH]
            if number == NUM_ENTRIES:
                return lambda: None
            self._words[_HIGH] = max(self._words[_HIGH], number + 1)
        start = _LOOP + (1 + number) * _ENTRY_WORDS
        self._write(start, request, since_ns, method, thread)

        def release() -> None:
            self._words[start] = 0
            with self._lock:
                self._free.append(number)

        return release

    def _write(self, start: int, request: int, since_ns: int, method: int, thread: int) -> None:
        words = self._words
        words[start + 1] = since_ns
        words[start + 2] = method
        words[start + 3] = thread
        words[start] = request

    # The reader's part.

    def look(self) -> Look:
        """As it is now; an entry that changes meanwhile is left out."""
        beside = [self._read(_LOOP + (1 + number) * _ENTRY_WORDS) for number in range(self._words[_HIGH])]
        return Look(self.row.heartbeat_ns, self._read(_LOOP), [entry for entry in beside if entry is not None])

    def _read(self, start: int) -> Entry | None:
        request, since_ns, method, thread = self._words[start : start + _ENTRY_WORDS].tolist()
        if not request or self._words[start] != request or self._words[start + 1] != since_ns:
            return None
        return Entry(request, since_ns, METHODS[method], thread)


def private_board() -> ActivityBoard:
    """One whose reader is in this process, or that has none."""
    board = ActivityBoard(memoryview(bytearray(NUM_BYTES)))
    board.format()
    board.introduce(0, 0)
    return board


def now_ns() -> int:
    """The clock of all entries."""
    return time.monotonic_ns()
