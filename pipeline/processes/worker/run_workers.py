"""The worker processes of one run: started, or taken over idle from the run before, and given their start messages."""

import os
from collections.abc import Callable
from typing import Any

from pipeline.processes.worker.run_blocks import LEARNER_ROW
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.processes.worker.worker_pool import WorkerPool
from pipeline.run_spec import RunSpec
from workers.errors import WorkerDied

# What the process of each role runs.
MODULES = {"learner": "workers.learner", "sampler": "workers.sampler", "environment": "pipeline.environments.process"}


class RunWorkers:
    """The handles of a run's learner, samplers and environment processes (none when environments run in a thread).

    `failure` is what the run failed with: from then on no process is started.
    """

    def __init__(
        self,
        pool: WorkerPool,
        spec: RunSpec,
        num_environment_processes: int,
        log_dir: str,
        on_error: Callable[[Exception], None],
    ) -> None:
        """on_error gets what the delivery of a worker's message raises."""

        def handle(role: str, index: int, threads: int) -> WorkerHandle:
            return pool.handle(role, index, MODULES[role], threads)

        self.learner = handle("learner", 0, spec.learner_threads)
        self.samplers = [handle("sampler", i, spec.sampler_threads) for i in range(spec.num_samplers)]
        self.environments = [handle("environment", i, 1) for i in range(num_environment_processes)]
        self.failure: BaseException | None = None
        self.max_restarts = spec.max_restarts
        self._pool = pool
        self._log_dir = log_dir
        self._on_error = on_error
        self._reused: set[WorkerHandle] = set()  # serve this run after another one

    @property
    def all(self) -> list[WorkerHandle]:
        return [self.learner, *self.samplers, *self.environments]

    @property
    def ledger_rows(self) -> dict[str, int]:
        """The ledger's row of each worker that has one, by process name."""
        samplers = {process_name(handle): 1 + LEARNER_ROW + i for i, handle in enumerate(self.samplers)}
        return {process_name(self.learner): LEARNER_ROW} | samplers

    @property
    def pids(self) -> dict[str, int]:
        """All processes of the run by name, this one too."""
        return {"supervisor": os.getpid()} | {process_name(handle): handle.pid for handle in self.all}

    def take_all(self, on_death: Callable[[WorkerDied], None]) -> None:
        """A living process for every handle; `on_death` is told when a new one ends by itself before its `start` is
        awaited. One that is killed by then is replaced when it is.
        """

        def died(error: WorkerDied) -> None:
            if not error.by_signal:
                on_death(error)

        for handle in self.all:
            handle.discard_if_dead()  # it may have died idle, after the run before
            if handle.started:
                self._reused.add(handle)
                self._attach(handle, on_death=_told_by_start)
            else:
                self._spawn(handle, on_death=died)

    def respawn(self, handle: WorkerHandle) -> None:
        """A new process in the place of a dead one; its `start` must be awaited next, and tells its death."""
        self._spawn(handle, on_death=_told_by_start)

    async def start(
        self, handle: WorkerHandle, config: dict[str, Any], on_death: Callable[[WorkerDied], None]
    ) -> dict[str, Any]:
        """Send the start message `config`; returns Ready's detail. From then on `on_death` is told of the process's
        end, until then whoever awaits this. Raises WorkerDied, RunError when it takes too long, or the run's failure.
        """
        if self.failure is not None:  # nobody would interrupt the wait
            raise self.failure
        handle.on_death = _told_by_start
        try:
            detail = await handle.start(config, self._log_dir)
        except WorkerDied:
            if handle not in self._reused or self.failure is not None:
                raise
            self._reused.discard(handle)  # it died idle, and its end was seen only now: a new one takes its place
            self.respawn(handle)
            detail = await handle.start(config, self._log_dir)
        self._reused.discard(handle)  # it serves this run now: its death is a death in this run
        handle.on_death = on_death
        return detail

    def discard_unready(self) -> None:
        """Kill those that have read, or may yet read, a start message whose blocks are about to go."""
        for handle in self.all:
            if not handle.ready:
                handle.discard()

    def fail(self, error: BaseException) -> None:
        """The run has failed: whoever waits in `start` gets `error`."""
        self.failure = error
        for handle in self.all:
            handle.give_up(error)

    def _spawn(self, handle: WorkerHandle, on_death: Callable[[WorkerDied], None]) -> None:
        self._pool.spawn(handle, self._log_dir)
        self._attach(handle, on_death)

    def _attach(self, handle: WorkerHandle, on_death: Callable[[WorkerDied], None]) -> None:
        handle.attach()
        handle.on_death, handle.on_error = on_death, self._on_error


def process_name(handle: WorkerHandle) -> str:
    """As metrics write it: learner, sampler-0, environment-1."""
    return handle.role if handle.role == "learner" else f"{handle.role}-{handle.index}"


def _told_by_start(error: WorkerDied) -> None:
    """For a process whose `start` is awaited, or will be: that raises its death."""
