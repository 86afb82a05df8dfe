"""Checksums of large files: made while a file is written, and made again by several threads that read it. A leaf: no
torch.

A file's checksum is the BLAKE2b, of 8 bytes, of the CRC-32s of its pieces (4 bytes each; all little-endian). So the
pieces can be read side by side, which a plain CRC-32 of the whole doesn't allow: zlib in Python can't join two of them.
Not a CRC-32 of CRC-32s: in that, equal faults in two neighbours, 4 bytes apart, take each other away.
"""

import hashlib
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 1 << 26
READ_BYTES = 1 << 20  # at a time: it is still in the core's own cache when it is added up
MAX_THREADS = 16  # each adds up about 2 GB/s; few disks give more than all of them together


class Cancelled(Exception):
    """Nobody wants the checksum any more."""


class Checksum:
    """Of a file whose bytes are given in order."""

    def __init__(self) -> None:
        self._ended = bytearray()  # the CRC-32s of the pieces before
        self._crc = self._num_bytes = 0  # of the present one

    def add(self, data: bytes | memoryview) -> None:
        """The next bytes of the file; it reads them without Python's lock."""
        left = memoryview(data).cast("B")
        while left:
            part = left[: PIECE_BYTES - self._num_bytes]
            self._crc = zlib.crc32(part, self._crc)
            self._num_bytes += len(part)
            left = left[len(part) :]
            if self._num_bytes == PIECE_BYTES:
                self._ended += _packed(self._crc)
                self._crc = self._num_bytes = 0

    @property
    def value(self) -> int:
        """Of the bytes so far: below 2**64."""
        return _joined(self._ended + (_packed(self._crc) if self._num_bytes else b""))


def checksum_of(data: bytes) -> int:
    """Of a file that holds just this."""
    checksum = Checksum()
    checksum.add(data)
    return checksum.value


def file_checksum(path: Path | str, is_cancelled: Callable[[], bool] = lambda: False) -> int:
    """Of the file as it is now. Blocks while it is read, by as many threads as there are cores. Raises OSError, and
    Cancelled soon after `is_cancelled`, which the threads call, says so.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        begins = range(0, os.fstat(descriptor).st_size, PIECE_BYTES)
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(begins))
        if num_threads <= 1:
            pieces = [_piece(descriptor, begin, is_cancelled) for begin in begins]
        else:
            with ThreadPoolExecutor(num_threads, "checksum") as threads:
                pieces = list(threads.map(lambda begin: _piece(descriptor, begin, is_cancelled), begins))
    finally:
        os.close(descriptor)
    return _joined(b"".join(map(_packed, pieces)))


def _piece(descriptor: int, begin: int, is_cancelled: Callable[[], bool]) -> int:
    """Its CRC-32. It is read, not mapped: of a file that is cut short meanwhile, or of a broken disk, a mapping would
    end the process.
    """
    buffer, crc = memoryview(bytearray(READ_BYTES)), 0
    for offset in range(begin, begin + PIECE_BYTES, READ_BYTES):
        if is_cancelled():
            raise Cancelled
        num_bytes = os.preadv(descriptor, [buffer], offset)
        crc = zlib.crc32(buffer[:num_bytes], crc)
        if num_bytes < READ_BYTES:  # the end of the file
            break
    return crc


def _joined(crcs: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(crcs, digest_size=8).digest(), "little")


def _packed(crc: int) -> bytes:
    return crc.to_bytes(4, "little")
