"""RUN_DIR/live.json: locked by the process that a run directory belongs to, and telling where its ledger is.

The lock is flock's, which the kernel lets go with the process, however it dies; a file that is there without a lock is
of a run that was killed. Who only reads where the ledger is needs no lock: `headway top` will, which isn't built yet.
"""

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.errors import ConfigError, RunError
from pipeline.run_dir.run_files import LIVE
from pipeline.user_warnings import warn_of_run

LOOK_SECONDS = 1.0  # someone who asks whether a run lives holds the lock for microseconds
RETRY_SECONDS = 0.01
MAX_BYTES = 1 << 16  # of a file that says so little
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of file systems


class RunLock:
    """Held from here to `close`, which removes the file. Raises ConfigError when another process, or another run of
    this one, has the directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = (run_dir / LIVE).absolute()
        self._file = _lock(self._path)
        self._live: dict[str, Any] = {"pid": os.getpid(), "since": time.time()}
        try:
            self.tell()
        except RunError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def tell(self, **fields: Any) -> None:
        """Add to what live.json says. Raises RunError."""
        self._live |= fields
        text = (json.dumps(self._live, indent=2) + "\n").encode()
        try:
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
        except OSError as error:
            raise RunError(f"{self._path} can't be written: {error.strerror}; see to that place.") from error

    def close(self) -> None:
        """A second call does nothing."""
        if self._file < 0:
            return
        file, self._file = self._file, -1
        try:
            if _is_there(self._path, file):
                self._path.unlink()
        except OSError as error:  # what stays is without a lock, and so of no run
            warn_of_run(f"{self._path} can't be removed: {error.strerror}.")
        finally:
            os.close(file)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def owner(run_dir: Path | str) -> int | None:
    """The pid of the process that the run directory belongs to now; None: of none."""
    path = Path(run_dir, LIVE)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(file)
    except OSError:  # a file system without locks: nothing tells
        return None
    finally:
        os.close(file)
    return None


def _lock(path: Path) -> int:
    """A descriptor of the file, locked."""
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} can't be made: {error.strerror}; see to that place.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _pid(file)
            os.close(file)
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{path.parent} belongs to a run that goes on{'' if pid is None else f' (process {pid})'}; stop "
                    "that one first, or name another directory."
                ) from None
            time.sleep(RETRY_SECONDS)
            continue
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(file)
                raise ConfigError(f"{path} can't be locked: {error.strerror}; see to that place.") from error
            warn_of_run(
                f"{path} can't be locked on this file system ({error.strerror}); let no other run use its directory."
            )
            return file
        # Whoever had it may have removed it meanwhile: then this is the lock of a file that nobody finds any more.
        if _is_there(path, file):
            return file
        os.close(file)


def _is_there(path: Path, file: int) -> bool:
    """Whether the open `file` is still the one of that name."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _pid(file: int) -> int | None:
    try:
        pid = json.loads(os.pread(file, MAX_BYTES, 0))["pid"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # it is being written
    return pid if isinstance(pid, int) else None
