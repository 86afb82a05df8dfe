"""Processes that are known by a variable of their environment, whoever their parent is by now, and their end.

Every process of a run, and whatever that starts, has `HEADWAY_RUN_FILES` (`sockets.py`) and `HEADWAY_WORKER`, unless it
was given another environment. Those are ended by their keeper (`keeper.py`); this is for what is left when the keeper
was killed, too.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable

from workers.processes import keeper

WORKER = "HEADWAY_WORKER"  # the endpoint of the process of ours that it descends from
GONE_SECONDS = 2.0  # bound on the wait for their end


def end_marked(variable: str, value: str, patience_seconds: float = 0.0) -> list[int]:
    """Kill every process of this user whose environment says so, but for this one and those it descends from, and
    return their process ids. They are gone then, unless the kernel needs more than GONE_SECONDS for it.

    patience_seconds: what keepers among them get first to end by themselves in: they know of more than the marked ones.
    """
    mark = os.fsencode(f"{variable}={value}")
    with contextlib.ExitStack() as stack:
        found = _open_marked(mark, stack)
        _wait([pidfd for pid, pidfd in found.items() if _is_keeper(pid)] if patience_seconds else [], patience_seconds)
        killed = []
        for pid, pidfd in found.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if not _wait([pidfd], 0.0):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    killed.append(pid)
        _wait(found.values(), GONE_SECONDS)
    return killed


def _open_marked(mark: bytes, stack: contextlib.ExitStack) -> dict[int, int]:
    """Process id -> a descriptor, by which no other process that gets the number meanwhile can be meant."""
    spared, found = _this_and_ancestors(), {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        if pid not in spared and _has_mark(pid, mark):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                stack.callback(os.close, pidfd)
                if _has_mark(pid, mark):  # the descriptor's process, if it lives
                    found[pid] = pidfd
    return found


def _wait(pidfds: Iterable[int], seconds: float) -> bool:
    """Until all have ended, for so long at most; whether they have."""
    deadline, ended = time.monotonic() + seconds, True
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended &= bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
    return ended


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # it is gone, or another user's
        return False


def _is_keeper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.fsencode(keeper.__file__) in file.read().split(b"\0")
    except OSError:
        return False


def _this_and_ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found
