"""A run that is under way: its shared memory, its workers, and what connects them. The first failure ends all of it."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from pipeline.environments.client import EnvironmentClient
from pipeline.environments.source import EnvSource
from pipeline.environments.thread import EnvironmentThread
from pipeline.errors import RunError
from pipeline.events import EventLog
from pipeline.gather import gather_all
from pipeline.learner_client import LearnerClient
from pipeline.run_blocks import LEARNER_ROW, RunBlocks
from pipeline.run_spec import RunSpec
from pipeline.sampler_client import RequestLimit, SamplerClient
from pipeline.slot_table import SlotTable
from pipeline.worker_handle import WorkerHandle
from pipeline.worker_pool import WorkerPool
from shm.errors import HeadwayError
from workers.errors import WorkerDied, WorkerFailed
from workers.messages import Message

MAX_RESTARTS = 5  # of samplers, within RESTART_WINDOW_SECONDS; more is no accident
RESTART_WINDOW_SECONDS = 600.0
WATCH_SECONDS = 1.0
GRACE_SECONDS = 10.0  # what an environment process gets beyond environment_timeout to end a call by itself
SILENT_SECONDS = 600.0  # a worker that has not moved its heartbeat for so long is killed


class ActiveRun:
    """Made by `Supervisor.open_run`; belongs to one asyncio loop; `close` frees the memory and leaves the processes
    idle.
    """

    def __init__(
        self,
        spec: RunSpec,
        env: EnvSource,
        pool: WorkerPool,
        events: EventLog,
        log_dir: str,
        max_requests: int,
        num_environment_processes: int,
    ) -> None:
        self.spec = spec
        self._env = env
        self.events = events
        self.num_restarts = 0
        self.failure: BaseException | None = None
        self._pool = pool
        self._log_dir = log_dir
        self._blocks = RunBlocks(spec, run_id=time.time_ns())
        self.ledger = self._blocks.ledger
        self.slots = SlotTable(spec.num_slots, self.ledger.write_lease, self._retired)
        self._limit = RequestLimit(max_requests)
        self.samplers = [SamplerClient(i, self._limit, self._broke) for i in range(spec.num_samplers)]
        self._learner_handle = pool.handle("learner", 0, "workers.learner", spec.learner_threads)
        self._sampler_handles = [
            pool.handle("sampler", i, "workers.sampler", spec.sampler_threads) for i in range(spec.num_samplers)
        ]
        self._environment_handles = [
            pool.handle("environment", i, "pipeline.environments.process", 1) for i in range(num_environment_processes)
        ]
        self.learner = LearnerClient(self._learner_handle.send, self._blocks.batches)
        self.environments: EnvironmentClient | None = None
        self._thread: EnvironmentThread | None = None
        self._slot_fields: dict[str, Any] = {}
        self._reused: set[WorkerHandle] = set()  # serve this run after another one
        self._restarts: deque[float] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._on_failure: list[WeakMethod] = []

    @property
    def ledger_rows(self) -> dict[str, int]:
        """The ledger's row of each worker, by process name."""
        samplers = {_process_name(handle): 1 + LEARNER_ROW + i for i, handle in enumerate(self._sampler_handles)}
        return {_process_name(self._learner_handle): LEARNER_ROW} | samplers

    @property
    def pids(self) -> dict[str, int]:
        """All processes of the run by name, this one too."""
        handles = [self._learner_handle, *self._sampler_handles, *self._environment_handles]
        return {"supervisor": os.getpid()} | {_process_name(handle): handle.pid for handle in handles}

    # --- start and end -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start (or use again) all processes and bring them to this run's first version."""
        handles = [self._learner_handle, *self._sampler_handles, *self._environment_handles]
        for handle in handles:
            handle.discard_if_dead()  # it may have died idle, after the run before
            if handle.started:
                self._reused.add(handle)
                self._attach(handle, on_death=_told_by_start)
            else:
                self._spawn(handle, on_death=self.fail)
        try:
            environments = [self._start_environment(handle) for handle in self._environment_handles]
            await gather_all(self._start_model(), *environments)
            if self.failure is not None:  # a worker was ready, and died before the others were
                raise self.failure
        except BaseException:
            for handle in handles:
                if not handle.ready:  # it has read, or may yet read, a start message whose blocks are about to go
                    handle.discard()
            raise
        self._learner_handle.on_message = self.learner.receive
        self.environments = self._open_environments()
        self._spawn_task(self._watch())

    async def _start_model(self) -> None:
        """The learner, which makes version 0, then the samplers."""
        detail = await self._start(self._learner_handle, self._blocks.learner_config(), self.fail)
        self._slot_fields = detail["slots"]
        self.slots.published(0, 0)
        await gather_all(*(self._start_sampler(i) for i in range(len(self.samplers))))

    def _spawn(self, handle: WorkerHandle, on_death: Callable[[WorkerDied], None]) -> None:
        self._pool.spawn(handle, self._log_dir)
        self._attach(handle, on_death)

    def _attach(self, handle: WorkerHandle, on_death: Callable[[WorkerDied], None]) -> None:
        handle.attach()
        handle.on_death, handle.on_error = on_death, self._broke

    async def _start(
        self, handle: WorkerHandle, config: dict[str, Any], on_death: Callable[[WorkerDied], None]
    ) -> dict[str, Any]:
        """Ready's detail; from then on `on_death` is told of its end, until then whoever awaits this."""
        if self.failure is not None:  # nobody would interrupt the wait
            raise self.failure
        handle.on_death = _told_by_start
        try:
            detail = await handle.start(config, self._log_dir)
        except WorkerDied:
            if handle not in self._reused or self.failure is not None:
                raise
            self._reused.discard(handle)  # it died idle, and its end was seen only now: a new one takes its place
            self._spawn(handle, on_death=_told_by_start)
            detail = await handle.start(config, self._log_dir)
        self._reused.discard(handle)  # it serves this run now: its death is a death in this run
        handle.on_death = on_death
        return detail

    async def _start_environment(self, handle: WorkerHandle) -> None:
        config = self._env.start_config(self.spec.environment_timeout, self.spec.max_tool_chars)
        await self._start(handle, config, self.fail)

    def _open_environments(self) -> EnvironmentClient:
        if not self._environment_handles:
            self._thread = EnvironmentThread(
                self._env.env_class,
                self._env.arguments,
                self.spec.environment_timeout,
                self.spec.max_tool_chars,
                os.path.join(self._log_dir, "environment-thread.log"),
            )
            client = EnvironmentClient([self._thread.send], self._broke)
            self._thread.start(self._guarded(client.receive))
            return client
        client = EnvironmentClient([handle.send for handle in self._environment_handles], self._broke)
        for handle in self._environment_handles:
            handle.on_message = client.receive
        return client

    async def _start_sampler(self, index: int) -> None:
        handle, client = self._sampler_handles[index], self.samplers[index]
        requests, replies, room, fields = self._blocks.sampler_queues(index)
        config = self._blocks.sampler_config(index, self._slot_fields) | fields
        await self._start(handle, config, lambda error: self._sampler_died(index, error))
        handle.on_message = client.receive
        client.connect(handle.send, requests, replies, room)

    async def close(self) -> None:
        """End the run: nothing is asked for any more; processes stay idle for the next one, memory is freed."""
        self.fail(RunError("The run has ended."))
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # Samplers first: what they have mapped by a CUDA IPC handle must not be freed before they have let go.
            await gather_all(*(handle.end_run() for handle in self._sampler_handles))
            await self._learner_handle.end_run()
        except BaseException:  # cut short, as by a loop that is being closed: who has not let go of the memory, goes
            for handle in self._pool.handles:
                handle.discard()
            raise
        finally:
            if self._thread is not None:
                self._thread.close()
            for handle in self._pool.handles:
                handle.detach()
            self._blocks.close()

    # --- failures ------------------------------------------------------------------------------------------------

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """callback(error), a bound method, is called once when the run fails: at once if it has. Its object is not kept
        alive for that: evaluations come and go.
        """
        if self.failure is not None:
            callback(self.failure)
        self._on_failure.append(WeakMethod(callback))

    def fail(self, error: BaseException) -> None:
        """The run can't go on: everybody who waits gets `error`. Only the first counts."""
        if self.failure is not None:
            return
        self.failure = error
        self.slots.lease_returned.set()  # who waits for a slot, too
        for sampler in self.samplers:
            sampler.fail(error)
        self.learner.fail(error)
        if self.environments is not None:
            self.environments.fail(error)
        for handle in (self._learner_handle, *self._sampler_handles, *self._environment_handles):
            handle.give_up(error)
        for reference in self._on_failure:
            callback = reference()
            if callback is not None:
                callback(error)

    def _broke(self, error: Exception) -> None:
        """Something of the supervisor's own went wrong in a callback, where nobody waits for it."""
        if not isinstance(error, HeadwayError):
            cause, error = error, RunError(f"A message could not be handled: {type(error).__name__}: {error}")
            error.__cause__ = cause
        self.fail(error)

    def _guarded(self, receive: Callable[[Message], None]) -> Callable[[Message], None]:
        """`receive` as a callback of the loop, which would log what it raises and go on."""

        def call(message: Message) -> None:
            try:
                receive(message)
            except Exception as error:  # a callback of the loop is an outermost frame
                self._broke(error)

        return call

    def _retired(self, version: int) -> None:
        """Nobody holds `version` any more: samplers may let go of its weights and shared prompts."""
        for sampler in self.samplers:
            sampler.release_version(version)

    def _sampler_died(self, index: int, error: WorkerDied) -> None:
        """A dead sampler is restarted; its trajectories keep their leases, so the same versions are still there. One
        that broke a rule is not: it would be asked the same again.
        """
        self.samplers[index].disconnect()
        if isinstance(error, WorkerFailed):
            self.fail(error)
        elif self.failure is None:
            self._spawn_task(self._restart_sampler(index, error))

    async def _restart_sampler(self, index: int, error: WorkerDied) -> None:
        handle = self._sampler_handles[index]
        while self.failure is None:
            now = time.monotonic()
            self._restarts.append(now)
            while now - self._restarts[0] > RESTART_WINDOW_SECONDS:
                self._restarts.popleft()
            if len(self._restarts) > MAX_RESTARTS:
                self.fail(RunError(f"Samplers died {len(self._restarts)} times within ten minutes. The last: {error}"))
                return
            self._spawn(handle, on_death=_told_by_start)
            self.num_restarts += 1
            self.events.log("restart", worker=handle.name, pid=handle.pid, cause=str(error))
            try:
                await self._start_sampler(index)
                return
            except WorkerFailed as final:
                self.fail(final)
            except WorkerDied as again:
                error = again
            except RunError as late:  # not ready in time
                self.fail(late)

    async def _watch(self) -> None:
        """Bounds on the waits that no process's death ends: a hung environment, a worker that stands still."""
        timeout = self.spec.environment_timeout + GRACE_SECONDS
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            overdue = self.environments.overdue(timeout)
            if overdue is not None:
                host, call = overdue
                self.fail(RunError(f"An environment hangs: {call}, longer than environment_timeout allows."))
                for handle in self._environment_handles[host : host + 1]:  # none when it is a thread
                    handle.discard()  # the next run gets a new one
                return
            for row, handle in enumerate([self._learner_handle, *self._sampler_handles]):
                beat = self.ledger.worker(row).read()
                silent = (time.monotonic_ns() - beat.heartbeat_ns) / 1e9
                if handle.started and beat.pid == handle.pid and beat.heartbeat_ns and silent > SILENT_SECONDS:
                    handle.kill()

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())


def _process_name(handle: WorkerHandle) -> str:
    """As metrics write it: learner, sampler-0, environment-1."""
    return handle.role if handle.role == "learner" else f"{handle.role}-{handle.index}"


def _told_by_start(error: WorkerDied) -> None:
    """For a process whose `start` is awaited, or will be: that raises its death."""
