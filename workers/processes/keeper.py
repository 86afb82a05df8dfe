"""Keep a program: when it ends, or whoever started it does, nothing that it has started is left.

`python -I -S keeper.py PARENT TOLD PROGRAM ARGUMENT…` starts the program, writes its process id to the descriptor TOLD,
waits, and ends in the way that it did. `KEEPER` as an argument becomes this process's own id, the program's parent. A
script by itself that imports nothing of ours: it has to be up in no time, and to outlive whatever it keeps.

It is the subreaper of all that the program starts: whose parent is gone becomes its child, with a session and an
environment of its own, too. So when it has no child left, there is nobody left. SIGTERM makes it end them all; the
kernel sends that when the parent dies, of whatever.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

KEEPER = "@keeper"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_SECONDS = 10.0  # for the kernel to end those that were killed; who waits for a dead disk can't be waited for
LOOK_SECONDS = 0.05  # between two looks at who is left, unless one ends sooner


def main() -> None:
    """Ends the process."""
    parent, told, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    # Blocked, and taken one by one below; nothing else that can be blocked ends it before its work is done.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    os.set_inheritable(told, False)
    command = [str(os.getpid()) if word == KEEPER else word for word in command]
    # SIGPIPE and SIGXFSZ are ignored in this interpreter, which a program would inherit.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    try:
        kept = os.posix_spawn(command[0], command, os.environ, setsigmask=[], setsigdef=defaults)
    except OSError as error:
        sys.exit(f"{command[0]} can't be started: {error.strerror}.")
    with contextlib.suppress(OSError):  # nobody reads it any more: the signal says so, too
        os.write(told, b"%d" % kept)
    os.close(told)
    end_like(wait_for(kept))


def wait_for(kept: int) -> int:
    """Its status when it has ended, or SIGKILL's when that was asked for; all that it has started is gone then."""
    status = None
    while status is None:
        asked = signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM
        status = reap().get(kept, signal.SIGKILL if asked else None)
    deadline = time.monotonic() + END_SECONDS
    while (left := children()) and time.monotonic() < deadline:
        for pid in left:  # a child that nobody has reaped: the number is still its own
            with contextlib.suppress(PermissionError):  # it has become another user's
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_SECONDS)
        reap()
    return status


def reap() -> dict[int, int]:
    """Children that have ended since: their status by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def children() -> list[int]:
    """Process ids of the children that there are."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case, without a look at every process there is
        return []
    own, found = os.getpid(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == own:
                found.append(int(name))
    return found


def end_like(status: int) -> None:
    """End with the same exit status, or by the same signal, without a second core file."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
