"""Bytes and values that no writer of ours makes: whole ones, spoiled at random."""

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

# Headers of msgpack (array, map, text, bytes, extension) that claim more than there is.
CLAIMS = tuple(
    kind + struct.pack(">I", size)
    for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")
    for size in (2**32 - 1, 70_000)
)
# Lists in lists, as deep as msgpack reads them and Python does not show them any more; and what JSON can't read.
NESTS = (b"\x91" * 1010, b"\x91" * 800, b"[" * 50_000)
INTEGERS = (0, 1, -1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63))
VALUES = (
    *(None, True, False, *INTEGERS, 2**64 - 1),
    *(0.5, -0.0, float("nan"), float("inf"), "", "x", "\0", "é" * 300, b"", b"\0" * 7, b"\xff" * 40),
    *([], {}, [[[[[]]]]], [None] * 50, {"x": {}}, {1: 2}, {"": [0]}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
)


def spoiled(draws: random.Random, samples: Sequence[bytes]) -> bytes:
    """One of `samples`, changed in one to four places; now and then nothing of it is left."""
    if draws.random() < 0.02:
        return draws.randbytes(draws.randrange(200))
    data = bytearray(draws.choice(samples))
    for _ in range(draws.choice((1, 1, 1, 2, 4))):
        draws.choice(_CHANGES)(draws, data, samples)
    return bytes(data)


def spoiled_values(draws: random.Random, value: Any) -> Any:
    """A tree of plain values in which one node, most often a deep one, is another value or is gone."""
    if isinstance(value, (list, dict)) and value and draws.random() < 0.9:
        copy: Any = list(value) if isinstance(value, list) else dict(value)
        place = draws.randrange(len(copy)) if isinstance(copy, list) else draws.choice(list(copy))
        chance = draws.random()
        if chance < 0.08:
            del copy[place]
        elif chance < 0.16 and isinstance(copy, list):
            copy.insert(place, draws.choice(VALUES))
        else:
            copy[place] = spoiled_values(draws, copy[place])
        return copy
    return draws.choice(VALUES)


def _flip_bit(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    if data:
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)


def _set_bytes(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    place = draws.randrange(len(data) + 1)
    data[place : place + 2] = draws.randbytes(draws.randrange(4))


def _cut(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    begin = draws.randrange(len(data) + 1)
    end = len(data) if draws.random() < 0.5 else begin + draws.randrange(20)
    del data[begin:end]


def _double(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    begin = draws.randrange(len(data) + 1)
    data[begin:begin] = data[begin : begin + draws.randrange(40)] * draws.randrange(4)


def _splice(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    other = draws.choice(samples)
    data[draws.randrange(len(data) + 1) :] = other[draws.randrange(len(other) + 1) :]


def _claim(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    place = draws.randrange(len(data) + 1)
    claim = draws.choice(CLAIMS)
    data[place : place + draws.choice((1, 5))] = claim * draws.choice((1, 1, 1, 50))


def _nest(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    place = draws.randrange(len(data) + 1)
    data[place:place] = draws.choice(NESTS)


def _set_integer(draws: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    code, size = draws.choice((("<q", 8), ("<i", 4), (">i", 4), (">q", 8)))
    place = draws.randrange(len(data) + 1)
    value = draws.choice(INTEGERS) if draws.random() < 0.7 else draws.randrange(3 * len(data) + 1)
    low = 1 << 8 * size - 1
    data[place : place + size] = struct.pack(code, (value + low) % (2 * low) - low)


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    *(_flip_bit, _set_bytes, _cut, _double, _splice, _claim, _nest, _set_integer),
)
