"""What makes a checkpoint complete: complete.msgpack, written last, which names every other file with its size and its
checksum; and state.msgpack, the trainer's state, which goes with the weights.

Sizes, and the state's checksum, are compared wherever a checkpoint is looked for; the checksums of the weights, which
may be 100 GB, where they are to be loaded (`check_contents`).

Both are read as plain msgpack values, checked one by one: nothing in them is ever executed.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from workers.errors import CheckpointError
from workers.model_files.checksum import checksum_of, file_checksum

MARKER = "complete.msgpack"
STATE = "state.msgpack"
FORMAT = 2  # of marker and state; 1 had no checksums
JOURNAL = "journal"  # of the state: the ordinal of the journal's file that goes on where the state ends
MAX_MARKER_BYTES = 1 << 20  # a marker has some thirty names: what is larger is none


class SavedFile(NamedTuple):
    """checksum: see `workers/model_files/checksum.py`."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Marker:
    """version: the policy's. journal: see JOURNAL. files: by their paths within the checkpoint, the marker left out."""

    version: int
    journal: int
    files: Mapping[str, SavedFile]


class Incomplete(Exception):
    """A checkpoint that can't be used; the message completes "version-7 can't be used: "."""


def pack_state(state: Mapping[str, Any]) -> bytes:
    """As state.msgpack holds it; it must name its journal's file, and have plain values only."""
    ordinal = state[JOURNAL]
    assert isinstance(ordinal, int) and ordinal >= 0, f"the state's journal file is {ordinal!r}"
    return msgpack.packb(dict(state), use_bin_type=True)


def make_marker(directory: Path, checksums: Mapping[str, int], version: int, journal: int) -> bytes:
    """For the files of these names, which are all there; their checksums are of what was to be written, so that what
    the disk has made of it shows. Raises OSError.
    """
    files = {name: (os.path.getsize(directory / name), checksum) for name, checksum in sorted(checksums.items())}
    return msgpack.packb({"format": FORMAT, "version": version, "journal": journal, "files": files})


def check_complete(directory: Path, version: int) -> Marker:
    """The marker of a checkpoint that has every file in its size, and the state that was saved. Raises Incomplete,
    naming what is missing.
    """
    marker = read_marker(directory)
    if marker.version != version:
        raise Incomplete(f"its {MARKER} is of version {marker.version}")
    for name, (num_bytes, _) in marker.files.items():
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
    if checksum_of(state) != marker.files[STATE].checksum:
        raise Incomplete(_changed(STATE))
    return marker


def check_contents(
    directory: Path, marker: Marker, names: Iterable[str], is_cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Compare files of a complete checkpoint with what was saved, byte for byte; what it doesn't have is left out.
    Blocks while they are read. Raises Incomplete, naming the one that differs, and Cancelled.
    """
    for name in names:
        if name not in marker.files:
            continue
        try:
            found = file_checksum(directory / name, is_cancelled)
        except OSError as error:
            raise Incomplete(f"its {name} can't be read ({error.strerror})") from None
        if found != marker.files[name].checksum:
            raise Incomplete(_changed(name))


def read_state(directory: Path, marker: Marker) -> dict[str, Any]:
    """The plain values that `pack_state` was given (tuples as lists). Raises CheckpointError for any other bytes."""
    path = directory / STATE
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}; make it readable.") from error
    if SavedFile(len(packed), checksum_of(packed)) != marker.files[STATE]:
        raise CheckpointError(f"{path} is not what was saved; remove this checkpoint, so that an older one is used.")
    try:
        state = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException, TypeError) as error:  # also of too deep a nesting
        raise CheckpointError(f"{path} holds no state ({error}); remove this checkpoint.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state; remove this checkpoint, so that an older one is used.")
    return state


def _changed(name: str) -> str:
    return f"its {name} is not what was saved"


def read_marker(directory: Path) -> Marker:
    """Of a checkpoint, or of a copy of one, whose files may be there or not. Raises Incomplete."""
    path = directory / MARKER
    try:
        with open(path, "rb") as file:
            packed = file.read(MAX_MARKER_BYTES + 1)
    except FileNotFoundError:
        raise Incomplete(f"it has no {MARKER}, which is written last") from None
    except OSError as error:
        raise Incomplete(f"its {MARKER} can't be read ({error.strerror})") from None
    broken = Incomplete(f"its {MARKER} is damaged")
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
    if values.keys() != {"format", "version", "journal", "files"}:
        raise broken
    version, journal, files = values["version"], values["journal"], values["files"]
    if not _is_count(version) or not _is_count(journal) or not isinstance(files, dict) or STATE not in files:
        raise broken
    if not all(_is_inner(name) and _is_saved_file(file) for name, file in files.items()):
        raise broken
    return Marker(version, journal, {name: SavedFile(*file) for name, file in files.items()})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_saved_file(values: Any) -> bool:
    return isinstance(values, list) and len(values) == len(SavedFile._fields) and all(map(_is_count, values))


def _is_inner(name: Any) -> bool:
    """Whether it is a path that can't lead out of the checkpoint."""
    return isinstance(name, str) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")
