"""What makes a checkpoint complete: complete.msgpack, written last, which names every other file with its size; and
state.msgpack, the trainer's state, which goes with the weights.

Both are read as plain msgpack values, checked one by one: nothing in them is ever executed.
"""

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack

from workers.errors import CheckpointError

MARKER = "complete.msgpack"
STATE = "state.msgpack"
FORMAT = 1  # of marker and state
JOURNAL = "journal"  # of the state: the ordinal of the journal's file that goes on where the state ends
MAX_MARKER_BYTES = 1 << 20  # a marker has some thirty names: what is larger is none


@dataclass(frozen=True, slots=True)
class Marker:
    """version: the policy's. journal: see JOURNAL. files: path within the checkpoint -> bytes, the marker left out.
    state_crc: CRC-32 of state.msgpack.
    """

    version: int
    journal: int
    files: Mapping[str, int]
    state_crc: int


class Incomplete(Exception):
    """A checkpoint that can't be used; the message completes "version-7 can't be used: "."""


def pack_state(state: Mapping[str, Any]) -> bytes:
    """As state.msgpack holds it; it must name its journal's file, and have plain values only."""
    ordinal = state[JOURNAL]
    assert isinstance(ordinal, int) and ordinal >= 0, f"the state's journal file is {ordinal!r}"
    return msgpack.packb(dict(state), use_bin_type=True)


def make_marker(directory: Path, names: Iterable[str], version: int, state: bytes, journal: int) -> bytes:
    """For the files of these names, which are all there. Raises OSError."""
    files = {name: os.path.getsize(directory / name) for name in sorted(names)}
    marker = Marker(version, journal, files, zlib.crc32(state))
    return msgpack.packb({"format": FORMAT} | asdict(marker))


def check_complete(directory: Path, version: int) -> Marker:
    """The marker of a checkpoint that has every file in its size, and the state that was saved. Raises Incomplete,
    naming what is missing.
    """
    marker = _read_marker(directory)
    if marker.version != version:
        raise Incomplete(f"its {MARKER} is of version {marker.version}")
    for name, num_bytes in marker.files.items():
        try:
            found = os.stat(directory / name).st_size
        except FileNotFoundError:
            raise Incomplete(f"its {name} is missing") from None
        except OSError as error:
            raise Incomplete(f"its {name} can't be read ({error.strerror})") from None
        if found != num_bytes:
            raise Incomplete(f"its {name} has {found:,} bytes of {num_bytes:,}")
    try:
        state = (directory / STATE).read_bytes()
    except OSError as error:
        raise Incomplete(f"its {STATE} can't be read ({error.strerror})") from None
    if zlib.crc32(state) != marker.state_crc:
        raise Incomplete(f"its {STATE} is not what was saved")
    return marker


def read_state(directory: Path, marker: Marker) -> dict[str, Any]:
    """The plain values that `pack_state` was given (tuples as lists). Raises CheckpointError for any other bytes."""
    path = directory / STATE
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}; make it readable.") from error
    if len(packed) != marker.files[STATE] or zlib.crc32(packed) != marker.state_crc:
        raise CheckpointError(f"{path} is not what was saved; remove this checkpoint, so that an older one is used.")
    try:
        state = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException, TypeError) as error:  # also of too deep a nesting
        raise CheckpointError(f"{path} holds no state ({error}); remove this checkpoint.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state; remove this checkpoint, so that an older one is used.")
    return state


def _read_marker(directory: Path) -> Marker:
    path = directory / MARKER
    try:
        with open(path, "rb") as file:
            packed = file.read(MAX_MARKER_BYTES + 1)
    except FileNotFoundError:
        raise Incomplete(f"it has no {MARKER}, which is written last") from None
    except OSError as error:
        raise Incomplete(f"its {MARKER} can't be read ({error.strerror})") from None
    broken = Incomplete(f"its {MARKER} is none")
    if len(packed) > MAX_MARKER_BYTES:
        raise broken
    try:
        values = msgpack.unpackb(packed)
    except (ValueError, msgpack.exceptions.UnpackException, TypeError):
        raise broken from None
    if not isinstance(values, dict) or not _is_count(values.get("format")):
        raise broken
    if values["format"] != FORMAT:
        raise Incomplete(f"its {MARKER} has format {values['format']}, and this Headway reads {FORMAT}")
    if values.keys() != {"format", "version", "journal", "files", "state_crc"}:
        raise broken
    del values["format"]
    files = values["files"]
    numbers = (values["version"], values["journal"], values["state_crc"])
    if not all(map(_is_count, numbers)) or not isinstance(files, dict) or STATE not in files:
        raise broken
    if not all(_is_inner(name) and _is_count(num_bytes) for name, num_bytes in files.items()):
        raise broken
    return Marker(**values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_inner(name: Any) -> bool:
    """Whether it is a path that can't lead out of the checkpoint."""
    return isinstance(name, str) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")
