"""How far the audit log was when, and what it said by then: RUN_DIR/journal/log.msgpack. The log of a week may have
gigabytes; a resume reads what came after the bookmark.

It is nothing but a short cut. One that is missing, damaged, or not of the log as it is now is passed over, and the log
read from its beginning. So it is not synced: of a power failure it may come out as anything.
"""

import os
import zlib
from pathlib import Path

import msgpack

from pipeline.journal.log_state import LogState
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.run_files import BOOKMARK, EVENTS
from pipeline.run_dir.synced_files import TEMPORARY
from pipeline.user_warnings import warn_of_run

FORMAT = 1
TAIL_BYTES = 1 << 12  # of the log before the bookmark, which must be what they were; `t` makes each line one of a kind


class LogBookmark:
    """The writer. log: what the events say that `events` had when it was opened; it is followed from here on."""

    def __init__(self, run_dir: str | os.PathLike[str], events: EventLog, log: LogState) -> None:
        self._run_dir = Path(run_dir)
        self._events = events
        self._log = log.copy()
        self._has_warned = False
        events.follow(self._log.apply)

    def save(self) -> None:
        """Of the log as it is now: well under a millisecond. Warns, once, if that can't be. Raises RunError when the
        log itself can't be written.
        """
        self._events.flush()
        end = self._events.num_bytes
        path = self._run_dir / BOOKMARK
        temporary = path.with_name(TEMPORARY + path.name)
        try:
            body = msgpack.packb([end, _tail_check(self._run_dir / EVENTS, end), self._log.to_plain()])
            temporary.write_bytes(msgpack.packb([FORMAT, zlib.crc32(body), body]))
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)  # a part of it would take up room on a disk that is full
            if not self._has_warned:
                self._has_warned = True
                warn_of_run(
                    f"{path} can't be written ({error.strerror}): when the run is resumed, it reads more of its log."
                )


def read_bookmark(run_dir: str | os.PathLike[str], num_decisions: int) -> tuple[int, LogState]:
    """(bytes of the log, what they say), to read on from. (0, nothing) without a bookmark that holds.

    num_decisions: what the journal has. A log that tells of more is cut off there, so a bookmark beyond that is none.
    """
    try:
        form, check, body = msgpack.unpackb((Path(run_dir) / BOOKMARK).read_bytes())
        if form == FORMAT and check == zlib.crc32(body):
            end, tail, plain = msgpack.unpackb(body, strict_map_key=False)
            log = LogState.from_plain(plain)
            is_there = tail is not None and tail == _tail_check(Path(run_dir) / EVENTS, end)
            if is_there and log.num_decisions <= num_decisions:
                return end, log
    except Exception:  # the file may hold anything, for which msgpack alone raises a family of classes
        pass
    return 0, LogState()


def _tail_check(path: Path, end: int) -> int | None:
    """Of the last bytes before `end`; None if the file is shorter."""
    begins = max(0, end - TAIL_BYTES)
    with open(path, "rb") as file:
        file.seek(begins)
        tail = file.read(end - begins)
    return zlib.crc32(tail) if len(tail) == end - begins else None
