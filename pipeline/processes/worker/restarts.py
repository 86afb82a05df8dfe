"""Dead processes of one kind in one run are started again, so often as accidents happen and no more."""

import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable

from pipeline.errors import RunError
from pipeline.processes.worker.run_workers import RunWorkers
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.run_dir.events import EventLog
from pipeline.user_warnings import warn_of_run
from workers.errors import WorkerDied, WorkerFailed

RESTART_WINDOW_SECONDS = 600.0  # more than max_restarts within it are no accidents


class Restarts:
    """`count` is how many there were.

    Of the deaths of one process and its successors those count together, too, between which they served for less than
    the window in all: one that takes long to start, and dies of its work (a batch that is too large for the memory),
    would be replaced for ever.
    """

    def __init__(
        self,
        kind: str,
        workers: RunWorkers,
        events: EventLog,
        fail: Callable[[BaseException], None],
        *,
        advice: str = "look into logs/ and at the machine's memory",
    ) -> None:
        """kind: of the processes, as in "Samplers died". fail(error) ends the run. advice: what can be done where they
        die again and again.
        """
        self.count = 0
        self._advice = advice
        self._kind = kind
        self._workers = workers
        self._events = events
        self._fail = fail
        self._accidents = _Accidents()
        self._of_place: dict[str, _Accidents] = defaultdict(_Accidents)  # by the worker's name, less starts

    async def start(self, handle: WorkerHandle, start: Callable[[], Awaitable[None]]) -> None:
        """The first process, or another one if that is killed before it serves. Raises WorkerDied for one that ended by
        itself, which its successor would do as well, or what the run failed with.
        """
        try:
            await start()
        except WorkerDied as error:
            if not error.by_signal or self._workers.failure is not None:
                raise
            await self.restart(handle, start, error)
            if self._workers.failure is not None:
                raise self._workers.failure from error

    async def restart(
        self,
        handle: WorkerHandle,
        start: Callable[[], Awaitable[None]],
        error: WorkerDied,
        *,
        is_accident: bool = True,
    ) -> None:
        """Until it serves again, or the run fails. start() brings a new process so far; error says what the one before
        died of; is_accident: nobody pays for it elsewhere, so it counts here.
        """
        while self._workers.failure is None:
            if is_accident and (too_many := self._too_many(handle)):
                self._fail(
                    RunError(
                        f"{too_many}, but max_restarts is {self._workers.max_restarts}; {self._advice}, then resume, "
                        f"or raise max_restarts. The last: {error}"
                    )
                )
                return
            self._workers.respawn(handle)
            self.count += 1
            self._events.log("restart", worker=handle.name, pid=handle.pid, cause=str(error))
            warn_of_run(f"{error} Another process (pid {handle.pid}) takes its place.")
            began = time.monotonic()
            try:
                await start()
                return
            except WorkerFailed as final:
                self._fail(final)
            except WorkerDied as again:
                error, is_accident = again, True
            except RunError as late:  # not ready in time
                self._fail(late)
            finally:
                self._of_place[handle.name].seconds_left_out += time.monotonic() - began

    def _too_many(self, handle: WorkerHandle) -> str:
        """Another accident: which are too many now, in words; empty: none."""
        of_kind, of_place = self._accidents.add(), self._of_place[handle.name].add()
        if of_kind > self._workers.max_restarts:
            return f"{self._kind} died {of_kind} times within ten minutes"
        if of_place > self._workers.max_restarts:
            return (
                f"The {handle.name} died {of_place} times within ten minutes, the time that it took to start left out"
            )
        return ""


class _Accidents:
    """When they were, within the window. seconds_left_out: that don't count towards it."""

    def __init__(self) -> None:
        self.seconds_left_out = 0.0
        self._times: deque[float] = deque()

    def add(self) -> int:
        """One that is now; returns how many there are."""
        now = time.monotonic() - self.seconds_left_out
        self._times.append(now)
        while now - self._times[0] > RESTART_WINDOW_SECONDS:
            self._times.popleft()
        return len(self._times)
