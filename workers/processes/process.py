"""A worker process as its supervisor sees it: start, watch, end, and what it said last.

`python -P -m workers.worker_main workers.<role>` rather than multiprocessing's spawn: the child imports only what its
role names and never the user's script (so no `__main__` guard is needed), has a session of its own, and nothing is
pickled. `-P` keeps the current directory out of its import path. It must be started from the main thread: the kernel
ties PR_SET_PDEATHSIG, by which it dies with its parent, to the thread that started it. One that runs users' code has a
keeper (`keeper.py`) between itself and us, which ends whatever that code has started.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workers.errors import ChannelError
from workers.machine.limits import memory_kills
from workers.processes import keeper
from workers.processes.leftovers import WORKER, end_marked
from workers.processes.stacks import VARIABLE as STACKS
from workers.processes.stacks import StackMemory

ROOT = str(Path(__file__).resolve().parents[2])  # where the packages lie, installed or in a checkout
FRAME = "workers.worker_main"  # becomes a worker first, then imports the role's module
LAST_WORDS_LINES = 12
KEEPER_UP_SECONDS = 10.0  # for a keeper to tell what it keeps, counted from when somebody asks
KEEPER_END_SECONDS = keeper.END_SECONDS + 2.0  # for it to end that
KILLED_SECONDS = 2.0  # for the kernel to end what SIGKILL was sent to


class WorkerProcess:
    """One started worker. `sentinel` is a descriptor that becomes readable when the process has ended; of one that is
    kept, when all that it has started is gone, too.
    """

    def __init__(
        self,
        module: str,
        endpoint: str,
        incarnation: int,
        log_path: str,
        environment: dict[str, str] | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ChannelError(
                f"{module} would be started from the thread {threading.current_thread().name!r}, and die with it; "
                "run the trainer in the main thread."
            )
        self.module = module
        self.log_path = log_path
        self.stacks = StackMemory()
        self._memory_kills = memory_kills()
        variables = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, *_python_path()]), WORKER: endpoint}
        variables[STACKS] = self.stacks.path
        parent = keeper.KEEPER if is_kept else str(os.getpid())
        command = [sys.executable, "-P", "-m", FRAME, module, endpoint, str(incarnation), parent]
        self._endpoint = endpoint
        self._is_kept = is_kept
        try:
            with open(log_path, "ab") as log:
                self._log_begins = log.tell()  # what is before is of other processes
                options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
                options["env"] = variables | (environment or {})
                if is_kept:
                    self._process, self._told = start_kept(command, **options)
                else:
                    self._process, self._told = subprocess.Popen(command, **options), -1
        except BaseException:
            self.stacks.close()
            raise
        self._pid = -1 if is_kept else self._process.pid
        self.sentinel = -1
        try:
            self.sentinel = os.pidfd_open(self._process.pid)
        except BaseException:  # nobody could watch it
            self._process.kill()
            self._process.wait()
            self._close_told()
            self.stacks.close()
            raise

    @property
    def pid(self) -> int:
        """The worker's own. Waits for its keeper to be up, which takes milliseconds from its start; the keeper's, if
        that was killed before it had started anybody.
        """
        if self._pid < 0:
            self._pid = told_pid(self._told, KEEPER_UP_SECONDS) or self._process.pid
            self._close_told()
        return self._pid

    @property
    def alive(self) -> bool:
        return not self._has_ended(0.0)

    def kill(self) -> None:
        """With what it has started itself; of one that has no keeper, as far as that is in its process group."""
        if self._process.returncode is not None:  # reaped: its number may be another's
            return
        if self._is_kept:
            end_kept(self._process)
        else:
            self._kill_group()

    def wait(self, timeout_seconds: float) -> bool:
        """True when it has ended and been reaped; what it has left behind is killed then."""
        if not self._has_ended(timeout_seconds):
            return False
        self._reap()
        return True

    def close(self) -> None:
        """Kill what is left, reap it, and close the sentinel. Idempotent. One that the kernel does not end within
        seconds is left to it.
        """
        if self.sentinel < 0:
            return
        self.kill()
        self._has_ended(KEEPER_END_SECONDS)
        self._reap()
        self._close_told()
        self.stacks.close()
        os.close(self.sentinel)
        self.sentinel = -1

    def _reap(self) -> None:
        if self._process.returncode is not None:
            return
        self._kill_group()
        if not self._has_ended(KILLED_SECONDS):
            return  # the kernel can't end it yet (a dead disk, a driver that hangs): that is nobody's to wait for
        if self._process.wait() == -signal.SIGKILL and self._is_kept:
            end_marked(WORKER, self._endpoint)  # it may have been the keeper that somebody killed

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _close_told(self) -> None:
        if self._told >= 0:
            os.close(self._told)
            self._told = -1

    def _has_ended(self, timeout_seconds: float) -> bool:
        """Whether it ends within that time; it is not reaped by asking."""
        if self._process.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(timeout_seconds * 1000))

    def describe_end(self) -> str:
        """How it ended, such as `was killed by SIGKILL` or `ended with status 1`."""
        status = self._process.poll()
        if status is None:
            return "is still running"
        if status == -signal.SIGKILL and self._memory_kills != memory_kills():
            return (
                "was killed by SIGKILL, probably for want of memory: the kernel has ended processes for that since "
                "this one started; give the machine or container more, or use less"
            )
        if status < 0:
            return f"was killed by {signal_name(-status)}"
        return f"ended with status {status}"

    @property
    def ended_by_signal(self) -> bool:
        status = self._process.poll()
        return status is not None and status < 0

    def log_to(self, path: str) -> None:
        """Its run's log is this one; it is told so by its start message."""
        if path != self.log_path:
            self.log_path = path
            self._log_begins = os.path.getsize(path) if os.path.exists(path) else 0

    def last_words(self) -> str:
        """The end of its log, one line each; empty if it has said nothing."""
        try:
            with open(self.log_path, "rb") as log:
                size = os.path.getsize(self.log_path)
                begins = self._log_begins if self._log_begins <= size else 0  # it was cut short meanwhile
                log.seek(max(begins, size - 4096))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(its log can't be read: {error})"
        return "\n".join(lines[-LAST_WORDS_LINES:])


def start_kept(command: list[str], pass_fds: Iterable[int] = (), **options: Any) -> tuple[subprocess.Popen, int]:
    """The keeper of `command`, started with the options of Popen, and a descriptor that tells what it keeps (see
    `told_pid`), for the caller to close. `keeper.KEEPER` in the command stands for the keeper's process id.
    """
    told, tells = os.pipe()
    try:
        kept = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(tells), *command]
        return subprocess.Popen(kept, pass_fds=[*pass_fds, tells], **options), told
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tells)


def told_pid(told: int, timeout_seconds: float) -> int | None:
    """The process id of what is kept; None of a keeper that does not come up in time, or was killed before."""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    return int(os.read(told, 20) or 0) or None if poll.poll(timeout_seconds * 1000) else None


def end_kept(process: subprocess.Popen) -> None:
    """Tell a keeper, not reaped yet, to end what it keeps and itself; also one that somebody has stopped."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.kill(process.pid, number)  # not by Popen, which would reap it


def signal_name(number: int) -> str:
    """Such as SIGKILL; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != ROOT]
