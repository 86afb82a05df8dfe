"""Dead processes of one kind in one run are started again, so often as accidents happen and no more."""

import time
from collections import deque
from collections.abc import Awaitable, Callable

from pipeline.errors import RunError
from pipeline.processes.worker.run_workers import RunWorkers
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.run_dir.events import EventLog
from pipeline.user_warnings import warn_of_run
from workers.errors import WorkerDied, WorkerFailed

RESTART_WINDOW_SECONDS = 600.0  # more than max_restarts within it are no accidents


class Restarts:
    """`count` is how many there were."""

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
        self._accidents: deque[float] = deque()  # when, within the window

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
            if is_accident and self._too_many():
                self._fail(
                    RunError(
                        f"{self._kind} died {len(self._accidents)} times within ten minutes, but max_restarts is "
                        f"{self._workers.max_restarts}; {self._advice}, then resume, or raise max_restarts. The last: "
                        f"{error}"
                    )
                )
                return
            self._workers.respawn(handle)
            self.count += 1
            self._events.log("restart", worker=handle.name, pid=handle.pid, cause=str(error))
            warn_of_run(f"{error} Another process (pid {handle.pid}) takes its place.")
            try:
                await start()
                return
            except WorkerFailed as final:
                self._fail(final)
            except WorkerDied as again:
                error, is_accident = again, True
            except RunError as late:  # not ready in time
                self._fail(late)

    def _too_many(self) -> bool:
        now = time.monotonic()
        self._accidents.append(now)
        while now - self._accidents[0] > RESTART_WINDOW_SECONDS:
            self._accidents.popleft()
        return len(self._accidents) > self._workers.max_restarts
