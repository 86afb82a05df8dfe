"""The private directory that holds a run's socket files, and the sweep of what killed runs have left."""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from typing import NamedTuple

from workers.errors import ChannelError
from workers.processes.leftovers import end_marked

PREFIX = "headway-"
LOCK = "lock"
OURS = b"headway\n"  # what its lock holds: others may have directories with such a name, and a file `lock` in it
RUN_FILES = "HEADWAY_RUN_FILES"  # the environment variable by which processes know it
UNFINISHED_SECONDS = 60.0  # a directory still without a lock after this never gets one
END_BY_THEMSELVES_SECONDS = 2.0  # what processes of a killed run get to do that in
MAX_SOCKET_PATH = 100  # bytes; the kernel allows 107 for a Unix socket's path
_MADE_NAME = re.compile(re.escape(PREFIX) + "[a-z0-9_]{8}")  # as mkdtemp draws it
_LONGEST_NAMES = len(PREFIX) + 40  # the directory's and a socket's


class Swept(NamedTuple):
    """A directory that was removed, and how many processes of its run were ended that were left, too."""

    path: str
    num_processes: int


class SocketDirectory:
    """A short `0700` directory, one per supervisor. Its owner holds a lock on it that dies with the process. Raises
    ChannelError when there is no place for one. `mark` is what its processes have in RUN_FILES: the same by
    whatever links a sweep comes to the directory.
    """

    def __init__(self) -> None:
        sweep_all()
        self.path, self._lock = _make_somewhere()
        self.mark = os.path.realpath(self.path)

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        """Remove the directory, after ending what is left of its processes. Idempotent."""
        if self._lock >= 0:
            end_marked(RUN_FILES, self.mark)
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def places() -> list[str]:
    """Where such directories may lie, the best first: they are made in one, and swept in all."""
    wanted = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    found = [
        tempfile.tempdir,
        *wanted,
        "/tmp",
        "/var/tmp",
        os.environ.get("XDG_RUNTIME_DIR"),
        f"/run/user/{os.getuid()}",
    ]
    return list(dict.fromkeys(os.path.abspath(path) for path in found if path))


def sweep_all() -> list[Swept]:
    """Remove what killed runs of this user have left, wherever such directories may lie."""
    return [swept for place in places() for swept in sweep(place)]


def sweep(base: str) -> list[Swept]:
    """Remove the directories of this user in `base` whose supervisor is gone."""
    removed = []
    try:
        with os.scandir(base) as entries:
            found = [e for e in entries if e.name.startswith(PREFIX) and e.is_dir(follow_symlinks=False)]
    except OSError:  # no such place, or none that is ours to see
        return []
    for entry in found:
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = os.open(os.path.join(entry.path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # another start removed it first, or it has no lock: it is being made, or never was finished
            _remove_if_old(entry.path)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner is alive; or, on a file system without locks, nobody knows
        else:
            if _holds(lock, OURS):
                left = end_marked(RUN_FILES, os.path.realpath(entry.path), END_BY_THEMSELVES_SECONDS)
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(Swept(entry.path, len(left)))
        finally:
            os.close(lock)
    return removed


def _make_somewhere() -> tuple[str, int]:
    """A new directory and the descriptor of its lock, in the first place that takes one."""
    refusals = []
    for base in places():
        room = MAX_SOCKET_PATH - _LONGEST_NAMES
        if len(os.fsencode(base)) > room:
            refusals.append(f"{base} has a name of {len(os.fsencode(base))} bytes, where a socket's leaves {room}")
            continue
        try:
            return _make(base)
        except OSError as error:
            refusals.append(f"{base} can't be used ({error.strerror})")
    raise ChannelError(
        f"There is no place for the run's sockets: {'; '.join(refusals)}. Set TMPDIR to a directory with a short name "
        "that can be written to."
    )


def _make(base: str) -> tuple[str, int]:
    path = tempfile.mkdtemp(prefix=PREFIX, dir=base)  # mkdtemp makes it 0700
    lock, name = -1, os.path.join(path, LOCK)
    try:
        lock = os.open(name + ".new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, OURS)
        with socket.socket(socket.AF_UNIX) as tried:  # not every file system has them
            tried.bind(os.path.join(path, "try"))
        os.unlink(os.path.join(path, "try"))
        os.rename(name + ".new", name)  # it gets its name locked, so that no sweep finds it free
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
        raise
    return path, lock


def _holds(file: int, contents: bytes) -> bool:
    try:
        return os.pread(file, len(contents) + 1, 0) == contents
    except OSError:  # a directory of that name
        return False


def _remove_if_old(path: str) -> None:
    """A directory without a lock whose maker was killed before it made one. What was made in another way than `_make`
    does, or holds anything else, is not ours.
    """
    with contextlib.suppress(OSError):
        found = os.stat(path)
        as_made = _MADE_NAME.fullmatch(os.path.basename(path)) and found.st_mode & 0o777 == 0o700
        if as_made and time.time() - found.st_mtime > UNFINISHED_SECONDS:
            left = set(os.listdir(path))
            if left <= {LOCK + ".new", "try"}:
                for name in left:
                    os.unlink(os.path.join(path, name))
            os.rmdir(path)
