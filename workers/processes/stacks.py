"""Python stacks of a process, on demand, also while it holds the interpreter's lock and never lets go of it.

By a signal whose handler is C code (`faulthandler`), which writes what every thread is at into memory that the asking
process reads. That memory has no name and belongs to whoever asks: nothing of it stays behind.
"""

import faulthandler
import os
import signal
import time

from workers.processes.process_stat import catches

# A real-time signal that neither the C library nor what users' code runs on takes for itself.
SIGNAL = signal.SIGRTMAX - 5
VARIABLE = "HEADWAY_STACKS"  # the environment variable that tells a worker where to write
NOTHING_SECONDS = 1.0  # without a byte, after which a process is taken for one that can't answer
QUIET_SECONDS = 0.05  # without a further byte, after which an answer is whole


def answer_with_stacks() -> None:
    """From now on this process answers. Nobody asks one that was not told where to write."""
    path = os.environ.pop(VARIABLE, None)  # what users' code starts is not asked
    if path is not None:
        memory = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        faulthandler.register(SIGNAL, file=memory, all_threads=True)


class StackMemory:
    """The asking end, for one process; `path` is for its environment variable."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("headway-stacks", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._memory}"
        self._asked = 0.0
        self._seen = (0, 0.0)  # bytes, and since when there are no more

    @property
    def is_closed(self) -> bool:
        """Whether its process has ended meanwhile."""
        return self._memory < 0

    def ask(self, pid: int) -> bool:
        """False: the process has no handler (not yet), and would die of the signal; or it has just ended."""
        os.ftruncate(self._memory, 0)
        self._asked = time.monotonic()
        self._seen = (0, self._asked)
        if not catches(pid, SIGNAL):
            return False
        try:
            os.kill(pid, SIGNAL)
        except OSError:  # its keeper reaps it at any time; one that was stopped has enough signals waiting
            return False
        return True

    def write_own(self) -> None:
        """Those of this process itself, in place of `ask`."""
        os.ftruncate(self._memory, 0)
        os.lseek(self._memory, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file=self._memory, all_threads=True)

    def is_whole(self) -> bool:
        """Whether the answer is there, as far as it will come; look again and again."""
        now, size = time.monotonic(), os.fstat(self._memory).st_size
        if size != self._seen[0]:
            self._seen = (size, now)
        if size == 0:
            return now - self._asked > NOTHING_SECONDS
        return now - self._seen[1] > QUIET_SECONDS

    def read(self) -> list[str]:
        """The answer's lines so far; none from a process that is stopped."""
        data = os.pread(self._memory, os.fstat(self._memory).st_size, 0)
        return data.decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        """Idempotent."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
