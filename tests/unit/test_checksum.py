"""A file's checksum is one and the same, however the file was written and by however many threads it is read."""

import hashlib
import os
import random
import zlib

import pytest

from workers.model_files import checksum
from workers.model_files.checksum import Cancelled, Checksum, checksum_of, file_checksum


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(checksum, "PIECE_BYTES", 64)
    monkeypatch.setattr(checksum, "READ_BYTES", 16)


def by_hand(data):
    """As the module's docstring says."""
    crcs = [zlib.crc32(data[begin : begin + 64]) for begin in range(0, len(data), 64)]
    together = b"".join(crc.to_bytes(4, "little") for crc in crcs)
    return int.from_bytes(hashlib.blake2b(together, digest_size=8).digest(), "little")


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 63, 64, 65, 128, 1000])
def test_written_read_and_given_whole_are_the_same(tmp_path, monkeypatch, num_bytes, num_threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(num_threads))
    draw = random.Random(num_bytes)
    data = draw.randbytes(num_bytes)
    (tmp_path / "file").write_bytes(data)
    written, left = Checksum(), data
    while left:
        cut = draw.randint(0, 100)
        written.add(left[:cut])
        left = left[cut:]
    assert written.value == checksum_of(data) == file_checksum(tmp_path / "file") == by_hand(data)


def test_every_flipped_bit_and_every_two_pieces_that_change_places_show(tmp_path):
    data = random.Random(1).randbytes(200)
    found = set()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        found.add(checksum_of(bytes(changed)))
    assert len(found) == 8 * len(data) and checksum_of(data) not in found  # so no two of them take each other away
    assert checksum_of(data[64:128] + data[:64] + data[128:]) != checksum_of(data)


def test_a_file_that_can_not_be_read_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        file_checksum(tmp_path / "absent")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_it_ends_soon_after_nobody_wants_it(tmp_path, monkeypatch, num_threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(num_threads))
    (tmp_path / "file").write_bytes(bytes(64 * 100))
    asked = []

    def is_cancelled():
        asked.append(1)
        return len(asked) > 5

    with pytest.raises(Cancelled):
        file_checksum(tmp_path / "file", is_cancelled)
    assert len(asked) < 6 + 101  # once for each piece that was not begun, instead of once for each read
