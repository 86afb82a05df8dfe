"""How one file of the journal is laid out: a header, then records, each with its length and a checksum.

    header   magic 8 bytes, format u32, ordinal u32, events u64, checksum u32 over the four
    record   marker 4 bytes, length u32, synced u64, events u64, checksum u32, then `length` bytes

The checksum covers the file's ordinal, the record's place and all else, so that a block of an older file, or a record
that was moved, never passes for one. `events`: how many events of the audit log stand for all records so far, those of
earlier files included. `synced`: so many bytes of the file were on the disk for certain when the record was written.
Behind the last such place a power failure may leave anything: what is broken there was never acted on and is cut off.
Before it, nothing may be broken.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.errors import JournalError

FORMAT = 1
MAX_RECORD = 1 << 30  # bytes; the largest batch has some 8 a token, and a write takes no more than 2 GiB at once

_MAGIC = b"HEADWAYJ"
_HEADER = struct.Struct("<8sIIQI")
_MARKER = b"\xabREC"
_FRAME = struct.Struct("<4sIQQI")
_SEARCHED = 1 << 20  # bytes read at once when looking for whole records behind a broken one
# Bytes of what may be records that are looked at there, at most: so many times the file's size (whole records are
# looked at less than once each) and so many more (what a power failure mixed up in a small file may look like many).
_LOOKED_AT = 2
_LOOKED_AT_ANYWAY = 1 << 24

HEADER_BYTES = _HEADER.size


def header(ordinal: int, events: int) -> bytes:
    """What file `ordinal` begins with."""
    start = struct.pack("<8sIIQ", _MAGIC, FORMAT, ordinal, events)
    return start + struct.pack("<I", zlib.crc32(start))


def frame(data: bytes, ordinal: int, place: int, synced: int, events: int) -> bytes:
    """What goes in front of a record's bytes, at byte `place` of the file. events: this record's included."""
    return _FRAME.pack(_MARKER, len(data), synced, events, _checksum(data, ordinal, place, synced, events))


class FrameReader:
    """The records of one file, in order, one in memory at a time. `end`: where the last whole one ends; `events`: how
    many events stand for the records so far. Both are those of the file's start before its first record.

    is_last: no file follows, so the run may have died in writing it: what is broken at its end was never acted on.
    Raises JournalError for a file that is not of the journal or of this format, and for damage anywhere else.
    """

    def __init__(self, path: Path, ordinal: int, is_last: bool, *, header_only: bool = False) -> None:
        self.end = 0
        self.events = 0
        self._path = path
        self._ordinal = ordinal
        self._is_last = is_last
        self._header_only = header_only

    def __iter__(self) -> Iterator[bytes]:
        try:
            with open(self._path, "rb") as file:
                yield from self._records(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise JournalError(f"{self._path} can't be read: {error.strerror}; see to that file.") from error

    def _records(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        found = file.read(HEADER_BYTES)
        if not self._is_header(found):
            # The run may have died before it was on the disk; then no record follows.
            is_torn = len(found) < HEADER_BYTES or not any(found)
            if not (self._is_last and is_torn and not _synced_behind(file, self._ordinal, 0, size)):
                raise self._wrong_header(found)
            return
        self.end, self.events = HEADER_BYTES, _HEADER.unpack(found)[3]
        while self.end < size and not self._header_only:
            record = _whole_record(file, self._ordinal, self.end, size)
            if record is None:
                if not self._is_last or _synced_behind(file, self._ordinal, self.end, size):
                    raise JournalError(
                        f"{self._path} is damaged at byte {self.end}, where a whole record was on the disk before. "
                        "Put back a good copy of the file; without it the run can't be resumed."
                    )
                return
            self.end += _FRAME.size + len(record.data)
            self.events = record.events
            yield record.data

    def _is_header(self, found: bytes) -> bool:
        return len(found) == HEADER_BYTES and found == header(self._ordinal, _HEADER.unpack(found)[3])

    def _wrong_header(self, found: bytes) -> JournalError:
        if len(found) == HEADER_BYTES and found[:8] == _MAGIC and _HEADER.unpack(found)[1] != FORMAT:
            return JournalError(
                f"{self._path} has format {_HEADER.unpack(found)[1]}, and this version of Headway reads {FORMAT}; "
                "resume the run with the version that began it."
            )
        return JournalError(
            f"{self._path} does not begin as file {self._ordinal} of a journal does; it was damaged or renamed. Put "
            "back a good copy; without it the run can't be resumed."
        )


def events_at_start(path: Path, ordinal: int, is_last: bool) -> int | None:
    """As the file's header says; None for a last file without one. Raises JournalError as `FrameReader` does."""
    reader = FrameReader(path, ordinal, is_last, header_only=True)
    for _ in reader:
        pass
    return reader.events if reader.end else None


class _Record(NamedTuple):
    synced: int
    events: int
    data: bytes


def _whole_record(file: BinaryIO, ordinal: int, place: int, size: int) -> _Record | None:
    """The record at `place`; None if no whole one is there."""
    file.seek(place)
    found = file.read(_FRAME.size)
    if len(found) < _FRAME.size:
        return None
    marker, length, synced, events, checksum = _FRAME.unpack(found)
    # Lengths are checked before memory is taken for them.
    if marker != _MARKER or length > MAX_RECORD or place + _FRAME.size + length > size or synced > place:
        return None
    data = file.read(length)
    if len(data) < length or checksum != _checksum(data, ordinal, place, synced, events):
        return None
    return _Record(synced, events, data)


def _synced_behind(file: BinaryIO, ordinal: int, place: int, size: int) -> bool:
    """Whether a whole record behind `place` says that the file was on the disk for certain beyond it.

    Also true of a file that is made of what only looks like such records, before they take for ever to look at.
    """
    begins, num_left = place + 1, _LOOKED_AT * size + _LOOKED_AT_ANYWAY
    while begins < size:
        file.seek(begins)
        found = file.read(_SEARCHED)
        offset = found.find(_MARKER)
        while 0 <= offset <= len(found) - _FRAME.size:
            _, length, synced, _, _ = _FRAME.unpack_from(found, offset)
            if place < synced <= begins + offset <= size - _FRAME.size - length:  # else none is there, and none is read
                num_left -= _FRAME.size + length
                if num_left < 0 or _whole_record(file, ordinal, begins + offset, size):
                    return True
            offset = found.find(_MARKER, offset + 1)
        begins += max(1, len(found) - _FRAME.size + 1)
    return False


def _checksum(data: bytes, ordinal: int, place: int, synced: int, events: int) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<IQIQQ", ordinal, place, len(data), synced, events)))
