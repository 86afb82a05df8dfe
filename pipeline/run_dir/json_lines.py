"""A file of JSON objects, one a line: how the run's logs are written, read and mended, and what a full disk says.

It serves events.jsonl, metrics.jsonl, trajectories.jsonl and eval.jsonl.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import RunError
from workers.machine.limits import room_at

# Made once: json.dumps with options makes an encoder per call. ASCII only, so that no character inside a text can end
# the line for some reader.
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=True).encode
_encode_readable = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
_BUFFERED = 1 << 16  # bytes of lines, beyond which they go to the system
_READ_BACK = 1 << 16  # bytes read at once when a file's last lines are looked for
_ENDS_LINES = re.compile("[\x85\u2028\u2029\ud800-\udfff]")  # for some reader, or no UTF-8 at all


def read_lines(path: str | os.PathLike[str], begins: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where its line begins, object) of each from byte `begins` on, where one must begin; one in memory at a time.
    None of a file that is not there. Raises RunError for a line that is none.
    """
    try:
        with open(path, "rb") as lines:
            lines.seek(begins)
            for line in lines:
                record = object_in(line)
                if record is None:
                    raise RunError(
                        f"Line {_lines_before(path, begins) + 1} of {path} is damaged: {line!r:.80}. Put back a good "
                        "copy of the file, or cut it off before that line."
                    )
                yield begins, record
                begins += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}; see to that file.") from error


def _lines_before(path: str | os.PathLike[str], end: int) -> int:
    """How many lines there are before byte `end`."""
    with open(path, "rb") as file:
        return sum(file.read(min(_READ_BACK, end - at)).count(b"\n") for at in range(0, end, _READ_BACK))


def cut_torn_tail(
    path: str | os.PathLike[str], stays: Callable[[Mapping[str, Any]], bool] = lambda record: True
) -> int:
    """Mend what a death left at the file's end, so that lines can be appended: returns how many bytes were cut off.

    A line that lacks nothing but its end gets it. Whole lines at the end go, too, as long as `stays` says no; those
    before the last one that stays are not looked at. No file is fine.
    """
    try:
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            end = size
            while end:
                record = object_in(line := _line_before(file, end))
                if record is not None and stays(record):
                    break
                end -= len(line)
            file.truncate(end)
            if end and not line.endswith(b"\n"):
                file.seek(end)
                file.write(b"\n")
            return size - end
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise RunError(f"{path} can't be mended: {error.strerror}; see to that file.") from error


def _line_before(file: BinaryIO, end: int) -> bytes:
    """The line that ends at byte `end`, its newline included if it has one."""
    found = b""
    while b"\n" not in found[:-1] and len(found) < end:
        begins = max(0, end - len(found) - _READ_BACK)
        file.seek(begins)
        found = file.read(end - len(found) - begins) + found
    return found[found.rfind(b"\n", 0, max(0, len(found) - 1)) + 1 :]


def object_in(line: bytes) -> dict[str, Any] | None:
    """What a line holds; None: it is none of ours, or broken."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class JsonLines:
    """A file of JSON objects, one a line, written by one process. Buffered: `flush` hands the lines to the system.

    What can't be written, as on a full disk, stays here for the next try: the file never lacks a line between others.
    for_people: letters beyond ASCII stand as themselves, in UTF-8. Raises RunError when the file can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str], *, for_people: bool = False):
        self._path = Path(path)
        self._for_people = for_people
        self._waiting = bytearray()  # for the system
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.num_bytes = os.fstat(self._file).st_size  # of the file, with those that wait
        except OSError as error:
            raise RunError(f"{self._path} can't be opened: {error.strerror}; see to that place.") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object. Raises RunError when the disk is full, and for a number that is not finite."""
        if self._file < 0:
            raise RunError(f"{self._path} is closed; nothing can be written to it any more.")
        try:
            line = _readable(record) if self._for_people else _encode(record)
        except ValueError as error:
            raise RunError(f"A record for {self._path} can't be written as JSON ({error}): {record!r}.") from error
        data = line.encode() + b"\n"
        self._waiting += data
        self.num_bytes += len(data)
        if len(self._waiting) >= _BUFFERED:
            self.flush()

    def flush(self) -> None:
        if self._file >= 0:
            self._guard(self._write_waiting)

    def sync(self) -> None:
        """Flush, and wait until the lines are on the disk."""
        if self._file >= 0:
            self.flush()
            self._guard(lambda: os.fsync(self._file))

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._file < 0:
            return
        try:
            self._write_waiting()
        except OSError as error:
            raise RunError(
                f"{self._path} could not be written to its end: {error.strerror}{room_at(self._path)}."
            ) from error
        finally:
            os.close(self._file)
            self._file = -1

    def _write_waiting(self) -> None:
        while self._waiting:
            del self._waiting[: os.write(self._file, self._waiting)]

    def _guard(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            raise RunError(
                f"{self._path} can't be written: {error.strerror}{room_at(self._path)}; make room, or use another disk."
            ) from error


def _readable(record: Mapping[str, Any]) -> str:
    return _ENDS_LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", _encode_readable(record))
