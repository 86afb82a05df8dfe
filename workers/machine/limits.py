"""What the system allows a process, and in words why it refused something. A leaf: no torch."""

import errno
import os
import resource
import threading
from pathlib import Path

from shm.block import available_bytes

MOST_DESCRIPTORS = 65_536  # no more are asked for, even where more may be had: programs walk through all they may have
CONTROL_GROUPS = Path("/sys/fs/cgroup")
KERNEL_COUNTS = Path("/proc/vmstat")
_NO_LIMIT = (resource.RLIM_INFINITY, -1)


def open_descriptors() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one by which it was looked


def raise_descriptor_limit(need: int) -> int:
    """Let this process have `need` descriptors, as far as it may say so itself; how many it may have now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = need if hard in _NO_LIMIT else min(need, hard)
    if soft in _NO_LIMIT or soft >= wanted:
        return need if soft in _NO_LIMIT else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since it started; None: it doesn't tell."""
    for line in _text(KERNEL_COUNTS).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return None


def require_threads(number: int) -> None:
    """Raise OSError unless so many more threads can be started: a library that starts its own may abort."""
    go_on = threading.Event()
    started = []
    try:
        for _ in range(number):
            thread = threading.Thread(target=go_on.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
    finally:
        go_on.set()
        for thread in started:
            thread.join()


def largest_file() -> int | None:
    """Bytes that a file, or a block of shared memory, of this process may have; None: there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft in _NO_LIMIT else soft


def refusal_in_words(error: OSError | MemoryError) -> str | None:
    """One sentence about the limit that the system has met, with what there is; None: it is about something else."""
    if isinstance(error, MemoryError):
        return _no_memory()
    place = f"{error.filename} can't be made or written" if error.filename is not None else "A file can't be written"
    match error.errno:
        case errno.EMFILE:
            may, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"Another file was needed, and this process has the {may} open that it may have; raise ulimit -n."
        case errno.ENFILE:
            return "Another file was needed, and this machine has all open that it may have; see fs.file-max."
        case errno.EAGAIN:
            return (
                f"Another process or thread was needed, and no more may be started: {_process_limit()}; end others, or "
                "raise that limit."
            )
        case errno.ENOMEM:
            return _no_memory()
        case errno.ENOSPC | errno.EDQUOT:
            return f"{place}: {os.strerror(error.errno)}{room_at(error.filename)}; make room, or use another disk."
        case errno.EROFS:
            return f"{place}: its file system can only be read; name another place."
        case errno.EFBIG:
            limit = largest_file()
            allowed = "the file system allows no larger file" if limit is None else f"ulimit -f allows {limit:,} bytes"
            return f"{place}: {allowed}; raise that limit, or use another disk."
    return None


def free_names(path: str | os.PathLike[str]) -> int | None:
    """How many more files and directories the file system of `path` takes; None: it does not count them."""
    found = os.statvfs(path)
    return found.f_favail if found.f_files else None


def _no_memory() -> str:
    return f"More memory was needed, and {available_bytes():,} bytes are free for this process; free some, or use less."


def _process_limit() -> str:
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft not in _NO_LIMIT:
        found.append(f"ulimit -u is {soft}")
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            folder = CONTROL_GROUPS / controllers / path.strip("/")
            while folder != CONTROL_GROUPS:  # every group above limits, too
                limit, used = (_text(folder / name) for name in ("pids.max", "pids.current"))
                if limit not in ("", "max"):
                    found.append(f"{folder}/pids.max is {limit}, of which {used} are there")
                folder = folder.parent
    return ", ".join(found) or "see ulimit -u"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def room_at(path: str | bytes | int | None) -> str:
    """In parentheses, what is left on the disk of a file that perhaps could not be made; nothing if nobody can tell."""
    try:
        folder = Path(os.fsdecode(path)).absolute() if path is not None and not isinstance(path, int) else None
        while folder is not None and not folder.is_dir():
            folder = folder.parent
        if folder is None:
            return ""
        found, names = os.statvfs(folder), free_names(folder)
    except OSError:
        return ""
    files = "" if names is None else f" and {names:,} further files"
    return f" ({found.f_bavail * found.f_frsize:,} bytes{files} are free)"
