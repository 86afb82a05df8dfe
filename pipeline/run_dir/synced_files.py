"""Files and directories that are on disk, name and contents, when a call returns; and their removal."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

TEMPORARY = ".tmp-"  # how the name of what is being made, or removed, begins


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Make `directory` with these files in it, synced. files: path within it -> contents."""
    directory.mkdir()
    for name, contents in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        write_file(path, contents)
    for folder in {(directory / name).parent for name in files}:
        sync_directory(folder)


def write_file(path: Path, contents: bytes) -> None:
    """A new file, synced; its name is only when its directory is."""
    with open(path, "xb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, contents: bytes) -> None:
    """The file with other contents, or as it was: whatever happens meanwhile, readers find one of the two."""
    temporary = path.with_name(TEMPORARY + path.name)
    temporary.unlink(missing_ok=True)
    try:
        write_file(temporary, contents)
        os.rename(temporary, path)
    except OSError:  # a part of it would take up room on a disk that is full
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have the names in it on disk, too: without that a crash may lose a file that was synced itself."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A directory with all in it, a file, or of a link the link alone; nothing if it isn't there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
