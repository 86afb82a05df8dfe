"""A run that is under way: its shared memory, its workers, and what connects them. The first failure ends all of it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from pipeline.endpoint.openai_endpoint import OpenAIEndpoint
from pipeline.errors import RunError, of_a_message
from pipeline.gather import gather_all
from pipeline.processes.environment.environment_client import EnvironmentClient
from pipeline.processes.environment.environment_hosts import EnvironmentHosts
from pipeline.processes.learner.learner_client import LearnerClient
from pipeline.processes.learner.learner_history import StartingPoint
from pipeline.processes.learner.run_learner import RunLearner
from pipeline.processes.learner.slot_table import SlotTable
from pipeline.processes.sampler.run_samplers import RunSamplers
from pipeline.processes.sampler.sampler_client import SamplerClient
from pipeline.processes.worker.run_blocks import RunBlocks
from pipeline.processes.worker.run_ends import RunEnds
from pipeline.processes.worker.run_workers import RunWorkers, process_name
from pipeline.processes.worker.worker_pool import WorkerPool
from pipeline.processes.worker.worker_watch import WorkerWatch
from pipeline.run_dir.events import EventLog
from pipeline.run_spec import RunSpec
from pipeline.user_code.source import EnvSource
from shm.ledger import WorkerRow
from workers.errors import CheckpointError
from workers.model_config import checkpoint_bytes

if TYPE_CHECKING:
    from pipeline.endpoint.server import EndpointServer

WATCH_SECONDS = 1.0  # between two looks at who stands still
STOPPED_SECONDS = 3.0  # for which a run that is to end waits for a learner that somebody has stopped


class ActiveRun:
    """Made by `Supervisor.open_run`; belongs to one asyncio loop; `close` frees the memory and leaves the processes
    idle.
    """

    def __init__(
        self,
        spec: RunSpec,
        env: EnvSource,
        *,
        pool: WorkerPool,
        events: EventLog,
        log_dir: str,
        max_requests: int,
        num_environment_processes: int,
        start: StartingPoint,
    ) -> None:
        self.spec = spec
        self._start = start
        self._env = env
        self.events = events
        self.failure: BaseException | None = None
        self._pool = pool
        self._log_dir = log_dir
        self._blocks = RunBlocks(spec, run_id=time.time_ns())
        self.ledger = self._blocks.ledger
        self.slots = SlotTable(spec.num_slots, self.ledger.write_lease, self._retired)
        self.workers = RunWorkers(pool, spec, num_environment_processes, log_dir, self._broke)
        self.endpoint: EndpointServer | None = None  # where agents drive the rollouts
        ends = RunEnds(self.fail, self._broke, self._spawn_task)
        self._samplers = RunSamplers(self.workers, self._blocks, events, ends, max_requests)
        self._learner = RunLearner(
            spec,
            self.workers,
            self._blocks,
            self.slots,
            events,
            ends,
            history=start.history,
            slots_lost=self._samplers.lose_weights,
            slots_made=self._samplers.find_weights,
        )
        self._hosts = EnvironmentHosts(
            spec,
            env,
            self.workers,
            self._blocks,
            events,
            ends,
            log_dir=log_dir,
            stands_still=lambda handle: self._watch.stands_still(handle),
        )
        self._watch = WorkerWatch(self.workers, self.time_rows, spec.worker_timeout, self._hosts.at_work)
        self._tasks: set[asyncio.Task] = set()
        self._on_failure: list[WeakMethod] = []
        self._ends_since: float | None = None  # when `end_soon` was called

    @property
    def live(self) -> dict[str, Any]:
        """What live.json says of a run that is open: where its ledger is, and whose the rows of its workers are."""
        return self._blocks.ledger_place() | {"workers": dict(self.workers.ledger_rows)}

    @property
    def learner(self) -> LearnerClient:
        return self._learner.client

    @property
    def samplers(self) -> list[SamplerClient]:
        return self._samplers.clients

    @property
    def environments(self) -> EnvironmentClient | None:
        """None until they are opened."""
        return self._hosts.client

    @property
    def standing_still(self) -> str:
        """Which of its processes does not get on, what it does instead, and what comes of it; empty: none."""
        return self._watch.standing_still

    @property
    def starting(self) -> str:
        """Behind "the processes to start": which are not ready, and which of them stand still."""
        names = ", ".join(process_name(handle) for handle in self.workers.all if handle.is_starting)
        standing = self.standing_still
        return (f": {names}" if names else "") + (f"; {standing}" if standing else "")

    @property
    def num_restarts(self) -> int:
        """Of all processes, so far."""
        return self._learner.num_restarts + self._samplers.num_restarts + self._hosts.num_restarts

    @property
    def num_log_cuts(self) -> int:
        """Of the environment processes' logs, so far."""
        return self._hosts.num_log_cuts

    @property
    def time_rows(self) -> dict[str, WorkerRow]:
        """Where each process that has one books its time, by process name."""
        rows = {name: self.ledger.worker(index) for name, index in self.workers.ledger_rows.items()}
        return rows | self._hosts.time_rows

    # --- start and end -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start (or use again) all processes and bring them to this run's first version.

        Users' code comes first: what can't be imported or made costs no loading of a model.
        """
        self.workers.take_all(on_death=self.fail)
        self._spawn_task(self._look_after())
        try:
            if isinstance(self._env, OpenAIEndpoint):  # first: a port that is taken is known at once
                self.endpoint = await self._env.serve(self.spec.sampling, Path(self._log_dir).parent, self._broke)
            await self._hosts.open()
            await self._start_model()
            if self.failure is not None:  # a worker was ready, and died before the others were
                raise self.failure
        except BaseException:
            self.workers.discard_unready()
            raise

    async def _start_model(self) -> None:
        """The learner, which makes the first version, then the samplers."""
        slot_fields = await self._learner.start(self._start.version, self._start.republish)
        await self._samplers.start(slot_fields)

    async def _look_after(self) -> None:
        """Bounds on the waits that no process's death ends; also while a run that has failed saves its weights."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._watch.look()
            if self.failure is None:
                self._hosts.look()
            if self._ends_since is not None:
                self._end_stopped_learner(time.monotonic() - self._ends_since)

    def _end_stopped_learner(self, seconds: float) -> None:
        """seconds: since the run was to end."""
        learner = self.workers.learner
        if min(seconds, self._watch.stopped_seconds(learner)) >= STOPPED_SECONDS:
            learner.kill("was stopped (SIGSTOP, or a debugger) while the run was to end")

    def end_soon(self, error: Exception) -> None:
        """The run is to end in order, within seconds. A learner that is being brought back, or dies or stays stopped
        (SIGSTOP) from now on, is not waited for: whoever does gets `error`.
        """
        self._ends_since = time.monotonic()
        self._learner.end_soon(error)

    async def save_weights(self, version: int, path: str, optimizer_path: str) -> tuple[int, int]:
        """Have the learner write the weights of `version`, float32, as the safetensors file `path`, and the optimizer's
        state as `optimizer_path`; returns the checksums of both. Also in a run that has failed. Cut short, it ends the
        learner, which would go on writing. Raises CheckpointError, or WorkerDied.
        """
        if not self.learner_serves:
            raise CheckpointError(f"The learner is gone, so version {version} can't be saved.")
        try:
            return await self.learner.save(version, path, optimizer_path, checkpoint_bytes(self.spec.model))
        except (asyncio.CancelledError, GeneratorExit, RunError):
            self._learner.discard(RunError("The learner was ended."))
            raise

    @property
    def learner_serves(self) -> bool:
        """Whether the process that holds the weights is there, or will be again."""
        return not self.learner.is_lost

    async def close(self, *, at_once: bool = False) -> None:
        """End the run: nothing is asked for any more; processes stay idle for the next one, memory is freed. at_once:
        who is at work still is not waited for.
        """
        self.fail(RunError("The run has ended."))
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self.endpoint is not None:
                await self.endpoint.close()
            # Samplers first: what they have mapped by a CUDA IPC handle must not be freed before they have let go.
            others = (*self.workers.samplers, *self.workers.environments)
            await gather_all(*(handle.end_run(at_once) for handle in others))
            self._hosts.discard_those_at_work()
            # One that nobody speaks to replays what nobody waits for.
            await self.workers.learner.end_run(at_once or self.learner.is_away)
            # A new process in a dead one's place: its Ready would be taken for one to the next run's start message.
            self.workers.discard_unready()
        except BaseException:  # cut short, as by a loop that is being closed: who has not let go of the memory, goes
            for handle in self._pool.handles:
                handle.discard()
            raise
        finally:
            self._hosts.close_thread()
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
        self._samplers.fail(error)
        self._learner.fail(error)
        if self.endpoint is not None:
            self.endpoint.fail(error)
        self._hosts.fail(error)
        self.workers.fail(error)
        for reference in self._on_failure:
            callback = reference()
            if callback is not None:
                callback(error)

    def _broke(self, error: Exception) -> None:
        """Something of the supervisor's own went wrong in a callback, where nobody waits for it."""
        self.fail(of_a_message(error))

    def _retired(self, version: int) -> None:
        """Nobody holds `version` any more."""
        self._samplers.release_version(version)

    def _spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())
