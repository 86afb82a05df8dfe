"""The private directory that holds a run's socket files, and the sweep of what killed runs have left."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time

PREFIX = "headway-"
RUN_FILES = "HEADWAY_RUN_FILES"  # the environment variable by which processes know it
UNFINISHED_SECONDS = 60.0  # a directory still without a lock after this never gets one
MAX_SOCKET_PATH = 100  # bytes; the kernel allows 107 for a Unix socket's path


class SocketDirectory:
    """A short `0700` directory, one per supervisor. Its owner holds a lock on it that dies with the process."""

    def __init__(self) -> None:
        base = _base()
        sweep(base)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)  # mkdtemp makes it 0700
        lock = os.path.join(self.path, "lock")
        self._lock = os.open(lock + ".new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(lock + ".new", lock)  # it gets its name locked, so that no sweep finds it free

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        """Remove the directory. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _base() -> str:
    """The temporary directory, or /tmp when its name is too long for a socket's path."""
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) + len(PREFIX) + 40 <= MAX_SOCKET_PATH else "/tmp"


def sweep(base: str) -> list[str]:
    """Remove the directories of this user whose supervisor is gone; returns their paths."""
    removed = []
    with os.scandir(base) as entries:
        found = [e for e in entries if e.name.startswith(PREFIX) and e.is_dir(follow_symlinks=False)]
    for entry in found:
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = os.open(os.path.join(entry.path, "lock"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another start removed it first, or it has no lock: it is being made, or never was finished
            _remove_if_old(entry.path)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner is alive
        else:
            shutil.rmtree(entry.path, ignore_errors=True)
            removed.append(entry.path)
        finally:
            os.close(lock)
    return removed


def _remove_if_old(path: str) -> None:
    """A directory without a lock whose maker was killed before it made one. What holds anything else is not ours."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(path).st_mtime > UNFINISHED_SECONDS:
            if os.listdir(path) == ["lock.new"]:
                os.unlink(os.path.join(path, "lock.new"))
            os.rmdir(path)
