"""Checkpoints as a run leaves them, made around whatever a directory holds."""

from pathlib import Path

from pipeline.checkpoints.marker import MARKER, STATE, make_marker, pack_state
from pipeline.checkpoints.saved import checkpoint_version


def complete(directory: Path, journal: int = 0, **state) -> Path:
    """Give `directory`, which is named by its version, a state and the marker that completes it."""
    packed = pack_state({"journal": journal} | state)
    (directory / MARKER).unlink(missing_ok=True)
    (directory / STATE).write_bytes(packed)
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    (directory / MARKER).write_bytes(make_marker(directory, names, checkpoint_version(directory), packed, journal))
    return directory
