"""The processes of one Supervisor: started at the first run, used again by later ones, ended with it."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import zmq

from pipeline.errors import RunError
from pipeline.processes.worker.worker_handle import WorkerHandle
from workers.machine.limits import open_descriptors, raise_descriptor_limit, refusal_in_words, require_threads
from workers.processes.sockets import SocketDirectory

STARTING_DESCRIPTORS = 24  # of the first process: with the socket directory, ZeroMQ's threads, pipes to the new one
ZMQ_THREADS = 2
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SECONDS = 5.0  # for all workers together to end in order, then they are killed


class WorkerPool:
    """Handles by role and index. Owns the socket directory and the ZeroMQ context."""

    def __init__(self) -> None:
        self._context: zmq.Context | None = None
        self._sockets: SocketDirectory | None = None
        self._handles: dict[tuple[str, int], WorkerHandle] = {}

    def handle(self, role: str, index: int, module: str, threads: int) -> WorkerHandle:
        key = (role, index)
        if key not in self._handles:
            self._handles[key] = WorkerHandle(role, index, module, threads)
        return self._handles[key]

    @property
    def handles(self) -> list[WorkerHandle]:
        return list(self._handles.values())

    def spawn(self, handle: WorkerHandle, log_dir: str) -> None:
        """Start a process for `handle`. Raises RunError when the system does not allow one more."""
        used = open_descriptors()
        have = raise_descriptor_limit(used + STARTING_DESCRIPTORS)
        if have < used + STARTING_DESCRIPTORS:  # asked first: ZeroMQ would abort
            raise RunError(
                f"The {handle.name} can't be started: that takes {STARTING_DESCRIPTORS} files, and this process has "
                f"{used} open of the {have} that it may have; raise that limit (ulimit -Hn)."
            )
        try:
            if self._sockets is None:
                require_threads(ZMQ_THREADS)
                self._sockets = SocketDirectory()
                self._context = zmq.Context()
            handle.spawn(self._context, self._sockets, log_dir)
        except (OSError, MemoryError) as error:
            raise RunError(f"The {handle.name} can't be started. {refusal_in_words(error) or error}") from error

    def close(self) -> None:
        """Ask all to end, wait, kill what is left, remove the socket directory. Idempotent.

        Takes STOP_SECONDS and a little at most; a signal of HELD_BACK that comes meanwhile is delivered after it, so
        that it can't leave the work half done.
        """
        with _signals_held_back():
            self._close()

    def _close(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        # Learners last: memory that samplers have mapped by a CUDA IPC handle must not be freed before they are gone.
        for last in (False, True):
            handles = [handle for handle in self.handles if (handle.role == "learner") is last]
            for handle in handles:
                handle.detach()
                handle.ask_to_stop()
            for handle in handles:
                handle.wait(max(0.0, deadline - time.monotonic()))
                handle.discard()
        self._handles.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Signals of HELD_BACK are delivered at the end of the block.

    By handlers, not by a mask: a signal that another thread takes runs its handler in this one all the same.
    """
    if threading.current_thread() is not threading.main_thread():  # only there are handlers set and run
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in HELD_BACK}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
