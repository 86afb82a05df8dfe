"""Checkpoints as a run leaves them, made around whatever a directory holds."""

from pathlib import Path

from pipeline.checkpoints.marker import MARKER, STATE, make_marker, pack_state
from pipeline.checkpoints.saved import checkpoint_version
from workers.model_files.checksum import file_checksum


def complete(directory: Path, journal: int = 0, **state) -> Path:
    """Give `directory`, which is named by its version, a state and the marker that completes it."""
    packed = pack_state({"journal": journal} | state)
    (directory / MARKER).unlink(missing_ok=True)
    (directory / STATE).write_bytes(packed)
    files = [path for path in directory.rglob("*") if path.is_file()]
    checksums = {str(path.relative_to(directory)): file_checksum(path) for path in files}
    (directory / MARKER).write_bytes(make_marker(directory, checksums, checkpoint_version(directory), journal))
    return directory
