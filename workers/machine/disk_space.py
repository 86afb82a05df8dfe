"""Whether a disk has room for what is to be written, told before it is written. A leaf: no torch."""

import shutil
from pathlib import Path

from workers.errors import CheckpointError


def require_space(directory: Path, num_bytes: int) -> None:
    """Raise CheckpointError, with need and have, unless `directory` has room for so many bytes more."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise CheckpointError(f"{directory} can't be written to: {error.strerror}; see to that place.") from error
    if free < num_bytes:
        raise no_space(directory, num_bytes)


def no_space(directory: Path, num_bytes: int) -> CheckpointError:
    """The refusal itself, for who finds the disk full while writing."""
    free = shutil.disk_usage(directory).free
    return CheckpointError(
        f"{directory} has {free:,} bytes free, and {num_bytes:,} are to be written; make room. Nothing was left there."
    )
