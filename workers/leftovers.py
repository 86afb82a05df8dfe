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

WORKER = "HEADWAY_WORKER"  # the endpoint of the process of ours that it descends from
GONE_SECONDS = 2.0  # bound on the wait for their end


def end_marked(variable: str, value: str) -> list[int]:
    """Kill every process of this user whose environment says so, but for this one and those it descends from; their
    process ids. They are gone then, unless the kernel needs more than GONE_SECONDS for it.
    """
    mark = os.fsencode(f"{variable}={value}")
    spared, ended = _this_and_ancestors(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        if pid not in spared and _has_mark(pid, mark):
            # By a descriptor, through which no other process that gets the number meanwhile can be meant.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                pidfd = os.pidfd_open(pid)
                ended.append((pid, pidfd))
                if _has_mark(pid, mark):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    deadline = time.monotonic() + GONE_SECONDS
    for _, pidfd in ended:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        os.close(pidfd)
    return [pid for pid, _ in ended]


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # it is gone, or another user's
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
