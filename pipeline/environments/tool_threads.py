"""Threads in which plain (not `async`) tools run, so that one does not hold up the other trajectories.

Why not `asyncio.to_thread`: its pool has `cores + 4` threads, too few for hundreds of tools that wait, and the
interpreter joins them at exit, so that one hung tool would keep the process from ending. These are daemon threads, made
when none is idle and used again.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from pipeline.environments.call_time import noted

IDLE_SECONDS = 30.0  # a thread without work ends after this


class ToolThreads:
    """`run(function)` from any event loop. The number of threads follows the number of calls that run at once."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait, less the work that waits for them
        self.num_threads = 0

    def run(self, function: Callable[[], Any]) -> asyncio.Future:
        """A future of the running loop with the function's result or exception.

        Cancelling the future gives up the answer; the function itself cannot be stopped.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            self._idle -= 1
            needs_thread = self._idle < 0
            if needs_thread:
                self._idle += 1
                self.num_threads += 1
        self._work.put((noted(function), loop, future))
        if needs_thread:
            threading.Thread(target=self._serve, name="headway-tool", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            try:
                function, loop, future = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle <= 0:
                        continue  # work was promised to this thread just now
                    self._idle -= 1
                    self.num_threads -= 1
                return
            result, failure = None, None
            try:
                result = function()
            except BaseException as raised:  # whatever a user's tool raises belongs to its caller, not to this thread
                failure = raised
            with self._lock:
                self._idle += 1
            try:
                loop.call_soon_threadsafe(_settle, future, result, failure)
            except RuntimeError:
                pass  # the loop has closed: nobody waits any more
            del function, loop, future, result, failure  # keep nothing of the user's alive while idle


def _settle(future: asyncio.Future, result: Any, failure: BaseException | None) -> None:
    if future.done():  # cancelled meanwhile
        return
    if failure is None:
        future.set_result(result)
    elif isinstance(failure, StopIteration):  # a future cannot carry it
        future.set_exception(RuntimeError(f"StopIteration: {failure}"))
    else:
        future.set_exception(failure)


TOOL_THREADS = ToolThreads()
