"""Unnamed shared memory: make a block, open it in another process, let it go.

A block is a memfd, reserved in full when it is made (`posix_fallocate`) and sealed against resizing: no later write
can meet SIGBUS. It has no name: other processes open `/proc/<maker>/fd/<n>`, and the kernel frees it with its last
user. So nothing can stay behind in /dev/shm, whose size limit does not apply either; `kill -9` included.
"""

import errno
import fcntl
import mmap
import os
import resource
from pathlib import Path

from shm.errors import BlockError

WRONG_LOOKING = 0xFF  # as a fill byte: -1 in integers of any width, NaN in float32, float16 and bfloat16
_FILL_BYTES = 1 << 20  # filled in strips, so that filling needs no second copy of the block
_NO_LIMIT = 1 << 62  # cgroup v1 writes "no limit" as a number near 2**63


class Block:
    """Shared memory of `num_bytes`, mapped here. Make one with `create` or `open`; `close` it, or use it in `with`.

    view: memoryview of unsigned bytes, writable unless opened otherwise. `close` gives up this holder's part; a numpy
    array or tensor made over the view keeps the mapping (but not `path`) alive until it goes too, so it never
    dangles.
    """

    def __init__(self, mapping: mmap.mmap, path: str, fd: int | None) -> None:
        self._view: memoryview | None = memoryview(mapping)
        self._fd = fd  # only the maker keeps one: it is what `path` leads to
        self.num_bytes = len(mapping)
        self.path = path

    @classmethod
    def create(cls, name: str, num_bytes: int, fill: int | None = None) -> "Block":
        """Reserve a new block, zeroed, or filled with the byte `fill` (`WRONG_LOOKING`: reading before writing shows).

        name: for people (`/proc/<pid>/maps`, errors); need not be unique. Raises BlockError when memory does not
        suffice.
        """
        if num_bytes < 1:
            raise BlockError(f"Block {name!r} has a size of {num_bytes} bytes; give at least 1.")
        # A memfd has no size limit of its own: the kernel would hand out pages until it kills somebody. So ask first.
        have = available_bytes()
        if num_bytes > have:
            raise BlockError(_too_large(name, num_bytes, have))
        fd = os.memfd_create(f"headway-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(fd, 0, num_bytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                mapping = mmap.mmap(fd, num_bytes)
            except OSError as error:
                if error.errno == errno.EFBIG:  # a limit on files, which a block is one of, too
                    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
                    raise BlockError(
                        f"Shared memory for {name!r} needs {num_bytes} bytes, and a file of this process may have "
                        f"{limit}; raise that limit (ulimit -f)."
                    ) from error
                raise BlockError(f"{_too_large(name, num_bytes, have)} ({error})") from error
            block = cls(mapping, f"/proc/{os.getpid()}/fd/{fd}", fd)
        except BaseException:
            os.close(fd)
            raise
        if fill is not None:
            block.fill(fill)
        return block

    @classmethod
    def open(cls, path: str, num_bytes: int, writable: bool = True) -> "Block":
        """Map the block that another process made. Raises BlockError when it is gone or of another size."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise BlockError(
                f"Block {path} cannot be opened ({error}); its maker must be alive, of the same user, and keep it open."
            ) from error
        try:
            found = os.fstat(fd).st_size
            if found != num_bytes:
                raise BlockError(f"Block {path} holds {found} bytes, not {num_bytes}; is it the block that was meant?")
            try:
                mapping = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise BlockError(f"Block {path} of {num_bytes} bytes cannot be mapped ({error}).") from error
        finally:
            os.close(fd)
        return cls(mapping, path, None)

    @property
    def view(self) -> memoryview:
        if self._view is None:
            raise BlockError(f"Block {self.path} is closed; open it again to use it.")
        return self._view

    def fill(self, byte: int) -> None:
        """Set every byte of the block."""
        strip = bytes([byte]) * min(_FILL_BYTES, self.num_bytes)
        for start in range(0, self.num_bytes, len(strip)):
            end = min(start + len(strip), self.num_bytes)
            self.view[start:end] = strip[: end - start]

    def close(self) -> None:
        """Give the block up; again and again is fine. Other holders, and views of it here, are not disturbed."""
        # Nothing is released by force: torch.frombuffer keeps the memoryview but no lock on it, and would be left
        # dangling. With the last view gone the mapping goes, at once.
        self._view = None
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __enter__(self) -> "Block":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def available_bytes() -> int:
    """Memory that this process could still take: the machine's, or what its control group (v1 or v2) or its limit on
    addresses (ulimit -v) leaves if that is less.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise BlockError("/proc/meminfo has no MemAvailable; Headway needs Linux 3.14 or later.")
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        available = max(0, min(available, addresses - used))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, used_name = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, used_name = (
                Path("/sys/fs/cgroup/memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        # Every group above limits too. In a container the path may be the host's, and only the root be visible.
        group = root / path.strip("/")
        for folder in [group, *group.parents][: len(group.parts) - len(root.parts) + 1]:
            available = min(available, _group_headroom(folder, limit_name, used_name))
    return available


def _group_headroom(folder: Path, limit_name: str, used_name: str) -> int:
    try:
        limit_text = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return _NO_LIMIT  # the root group, or no memory controller here
    if limit_text == "max" or int(limit_text) >= _NO_LIMIT:
        return _NO_LIMIT
    cache = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))  # given back when needed
    return max(0, int(limit_text) - used + cache)


def _too_large(name: str, need: int, have: int) -> str:
    return (
        f"Shared memory for {name!r} needs {need} bytes ({need / 2**20:.1f} MiB), and {have} bytes "
        f"({have / 2**20:.1f} MiB) are available; use a smaller model, fewer slots or a smaller queue, or free memory."
    )
