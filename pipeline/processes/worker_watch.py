"""What a run does about workers that die or stand still: dead samplers are restarted, silent workers killed, and an
environment that hangs ends the run.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from pipeline.environments.client import EnvironmentClient
from pipeline.errors import RunError
from pipeline.events import EventLog
from pipeline.processes.run_blocks import LEARNER_ROW
from pipeline.processes.run_workers import RunWorkers
from shm.ledger import Ledger
from workers.errors import WorkerDied, WorkerFailed

MAX_RESTARTS = 5  # of samplers, within RESTART_WINDOW_SECONDS; more is no accident
RESTART_WINDOW_SECONDS = 600.0
WATCH_SECONDS = 1.0
GRACE_SECONDS = 10.0  # what an environment process gets beyond environment_timeout to end a call by itself
SILENT_SECONDS = 600.0  # a worker that has not moved its heartbeat for so long is killed


class WorkerWatch:
    """For one run; `num_restarts` counts its samplers' restarts."""

    def __init__(
        self,
        workers: RunWorkers,
        ledger: Ledger,
        events: EventLog,
        start_sampler: Callable[[int], Awaitable[None]],
        fail: Callable[[BaseException], None],
    ) -> None:
        """start_sampler(index) brings a new process to the run's versions; fail(error) ends the run."""
        self.num_restarts = 0
        self._workers = workers
        self._ledger = ledger
        self._events = events
        self._start_sampler = start_sampler
        self._fail = fail
        self._restarts: deque[float] = deque()  # when, within the window

    async def restart_sampler(self, index: int, error: WorkerDied) -> None:
        """Until it serves again, or the run fails. `error` says what its process died of."""
        handle = self._workers.samplers[index]
        while self._workers.failure is None:
            now = time.monotonic()
            self._restarts.append(now)
            while now - self._restarts[0] > RESTART_WINDOW_SECONDS:
                self._restarts.popleft()
            if len(self._restarts) > MAX_RESTARTS:
                self._fail(RunError(f"Samplers died {len(self._restarts)} times within ten minutes. The last: {error}"))
                return
            self._workers.respawn(handle)
            self.num_restarts += 1
            self._events.log("restart", worker=handle.name, pid=handle.pid, cause=str(error))
            try:
                await self._start_sampler(index)
                return
            except WorkerFailed as final:
                self._fail(final)
            except WorkerDied as again:
                error = again
            except RunError as late:  # not ready in time
                self._fail(late)

    async def watch(self, environments: EnvironmentClient, environment_timeout: float) -> None:
        """Bounds on the waits that no process's death ends; environment_timeout in seconds. Returns when the run has
        failed for a hung environment.
        """
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            overdue = environments.overdue(environment_timeout + GRACE_SECONDS)
            if overdue is not None:
                host, call = overdue
                self._fail(
                    RunError(
                        f"An environment hangs: {call}, longer than environment_timeout = {environment_timeout:g} s "
                        "allows, and can't be interrupted. Await what takes long, or raise environment_timeout."
                    )
                )
                for handle in self._workers.environments[host : host + 1]:  # none when it is a thread
                    handle.discard()  # the next run gets a new one
                return
            self._kill_silent()

    def _kill_silent(self) -> None:
        """Their end is then told like any other death."""
        for row, handle in enumerate([self._workers.learner, *self._workers.samplers], LEARNER_ROW):
            beat = self._ledger.worker(row).read()
            silent = (time.monotonic_ns() - beat.heartbeat_ns) / 1e9
            if handle.started and beat.pid == handle.pid and beat.heartbeat_ns and silent > SILENT_SECONDS:
                handle.kill()
