"""A worker process as its supervisor sees it: start, watch, end, and what it said last.

`python -P -m workers.worker_main workers.<role>` rather than multiprocessing's spawn: the child imports only what its
role names and never the user's script (so no `__main__` guard is needed), has a session of its own, and nothing is
pickled. `-P` keeps the current directory out of its import path. It must be started from the main thread: the kernel
ties PR_SET_PDEATHSIG, by which it dies with its parent, to the thread that started it.
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

from workers.errors import ChannelError

ROOT = str(Path(__file__).resolve().parent.parent)  # where the packages lie, installed or in a checkout
FRAME = "workers.worker_main"  # becomes a worker first, then imports the role's module
LAST_WORDS_LINES = 12


class WorkerProcess:
    """One started worker. `sentinel` is a descriptor that becomes readable when the process has ended."""

    def __init__(
        self, module: str, endpoint: str, incarnation: int, log_path: str, environment: dict[str, str] | None = None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ChannelError(
                f"{module} would be started from the thread {threading.current_thread().name!r}, and die with it; "
                "run the trainer in the main thread."
            )
        self.module = module
        self.log_path = log_path
        variables = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, *_python_path()])} | (environment or {})
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", FRAME, module, endpoint, str(incarnation), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=variables,
            )
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def alive(self) -> bool:
        return not self._has_ended(0.0)

    def kill(self) -> None:
        """With what it has started itself, as far as that is in its process group."""
        if self._process.returncode is None:  # not reaped yet, so that its number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_seconds: float) -> bool:
        """True when it has ended and been reaped; what it has left behind in its process group is killed then."""
        if not self._has_ended(timeout_seconds):
            return False
        self.kill()
        self._process.wait()
        return True

    def close(self) -> None:
        """Kill what is left, reap it, and close the sentinel. Idempotent."""
        self.kill()
        self._process.wait()
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

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
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def last_words(self) -> str:
        """The end of its log, one line each."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(0, os.path.getsize(self.log_path) - 4096))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(its log can't be read: {error})"
        return "\n".join(lines[-LAST_WORDS_LINES:])


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != ROOT]


def processor_ticks(pid: int, threads: Iterable[int]) -> dict[int, int]:
    """Clock ticks that threads of a process have used of the processor, by the kernel's thread ids; without those that
    have ended.
    """
    ticks = {}
    for thread in threads:
        fields = _stat_fields(f"/proc/{pid}/task/{thread}/stat")
        if fields:
            ticks[thread] = int(fields[11]) + int(fields[12])
    return ticks


def is_halted(pid: int) -> bool:
    """Whether somebody has stopped the process (SIGSTOP, a debugger)."""
    return _stat_fields(f"/proc/{pid}/stat")[:1] in (["T"], ["t"])


def _stat_fields(path: str) -> list[str]:
    """Those behind the command's name: the state first. Empty if the process is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
