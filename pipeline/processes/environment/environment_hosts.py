"""A run's environment hosts, processes or the thread that stands in for them: started, watched, replaced, ended."""

import os
from collections.abc import Callable
from functools import partial

from pipeline.environments.activity import private_board
from pipeline.environments.thread import EnvironmentThread
from pipeline.gather import gather_all
from pipeline.processes.environment.environment_client import EnvironmentClient
from pipeline.processes.environment.environment_watch import EnvironmentWatch
from pipeline.processes.worker.restarts import Restarts
from pipeline.processes.worker.run_blocks import RunBlocks
from pipeline.processes.worker.run_ends import RunEnds
from pipeline.processes.worker.run_workers import RunWorkers, process_name
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.run_dir.events import EventLog
from pipeline.run_spec import RunSpec
from pipeline.user_code.source import EnvSource
from shm.ledger import WorkerRow
from workers.errors import WorkerDied, WorkerFailed
from workers.messages import Message

# Where processes die while no call is in user code, which would be blamed.
ADVICE = (
    "no call was in your code when they did, so look at what it leaves running (threads, timers), at the descriptors "
    "that it closes, at logs/ and at the machine's memory"
)


class EnvironmentHosts:
    """`client` speaks to them; None until `open`."""

    def __init__(
        self,
        spec: RunSpec,
        env: EnvSource,
        workers: RunWorkers,
        blocks: RunBlocks,
        events: EventLog,
        ends: RunEnds,
        *,
        log_dir: str,
        stands_still: Callable[[WorkerHandle], bool],
    ) -> None:
        """stands_still(handle): its process does not get on."""
        self.client: EnvironmentClient | None = None
        self._spec = spec
        self._env = env
        self._workers = workers
        self._handles = workers.environments
        self._log_dir = log_dir
        self._ends = ends
        self._stands_still = stands_still
        self._restarts = Restarts("Environment processes", workers, events, ends.fail, advice=ADVICE)
        boards = [blocks.activity_board() for _ in self._handles]
        self._boards = [board for board, _ in boards]
        self._board_fields = [fields for _, fields in boards]
        self._watch: EnvironmentWatch | None = None
        self._thread: EnvironmentThread | None = None

    @property
    def num_restarts(self) -> int:
        """Of their processes, so far."""
        return self._restarts.count

    @property
    def num_log_cuts(self) -> int:
        """How often what users' code printed was cut, so far."""
        return self._watch.num_log_cuts if self._watch is not None else 0

    @property
    def time_rows(self) -> dict[str, WorkerRow]:
        """Where each process books its time, by process name."""
        boards = zip(self._handles, self._boards, strict=False)  # the board of a thread has no process
        return {process_name(handle): board.row for handle, board in boards}

    async def open(self) -> None:
        """Serve: users' code is imported and tried by then. Raises what `RunWorkers.start` does, or ConfigError for the
        code of a thread.
        """
        self.client = self._open_thread() if self._env.runs_in_thread else self._client([h.send for h in self._handles])
        self._watch = EnvironmentWatch(
            self.client,
            self._boards,
            self._handles,
            self._restarts,
            timeout=self._env.call_timeout(self._spec.environment_timeout),
            silence=self._env.silence_timeout(self._spec.environment_timeout),
            log_dir=self._log_dir,
            fail=self._ends.fail,
        )
        starts = (partial(self._start, host, try_first=True) for host in range(len(self._handles)))
        pairs = zip(self._handles, starts, strict=True)
        await gather_all(*(self._restarts.start(handle, start) for handle, start in pairs))

    def look(self) -> None:
        """Once a second: end what hangs."""
        if self._watch is not None:
            self._watch.look()

    def at_work(self, handle: WorkerHandle) -> str | None:
        """Whose code holds up the process, in words; None if nobody's does, or `handle` is of no environment's."""
        if self._watch is None or handle not in self._handles:
            return None
        return self._watch.at_work(self._handles.index(handle))

    def fail(self, error: BaseException) -> None:
        """The run has failed: whoever waits for an environment gets `error`."""
        if self.client is not None:
            self.client.fail(error)

    def discard_those_at_work(self) -> None:
        """Users' code that has not ended with its run must not go on beside the next one's; nor may a process that is
        being started read of memory that is about to go.
        """
        for handle, board in zip(self._handles, self._boards, strict=False):
            if not handle.ready or board.look().everyone:
                handle.discard()

    def close_thread(self) -> None:
        """The processes are the pool's to end; the thread, if there is one, ends with its run."""
        if self._thread is not None:
            self._thread.close()

    def _client(self, senders: list[Callable[[Message], None]]) -> EnvironmentClient:
        return EnvironmentClient(
            senders,
            self._ends.on_error,
            stands_still=lambda host: bool(self._handles) and self._stands_still(self._handles[host]),
        )

    def _open_thread(self) -> EnvironmentClient:
        self._boards = [private_board()]
        self._thread = EnvironmentThread(
            *self._env.load_makers(),
            self._spec.environment_timeout,
            self._spec.max_tool_chars,
            os.path.join(self._log_dir, "environment-thread.log"),
            self._boards[0],
        )
        client = self._client([self._thread.send])
        self._thread.start(self._guarded(client.receive))
        return client

    async def _start(self, host: int, *, try_first: bool = False) -> None:
        """try_first: the class is tried before the process says that it is ready."""
        handle = self._handles[host]
        config = {"activity": self._board_fields[host], "try_first": try_first}
        config |= self._env.start_config(self._spec.environment_timeout, self._spec.max_tool_chars)
        await self._workers.start(handle, config, lambda error: self._died(host, error))
        handle.on_message = self.client.receive
        self.client.back(host)

    def _died(self, host: int, error: WorkerDied) -> None:
        """Another process takes its place; its trajectories start again, or go on, there or elsewhere. One that broke a
        rule gets no successor: it would be asked the same again.
        """
        if isinstance(error, WorkerFailed):
            self._ends.fail(error)
        elif self._workers.failure is None:
            self._ends.spawn_task(self._watch.replace(host, error, partial(self._start, host)))

    def _guarded(self, receive: Callable[[Message], None]) -> Callable[[Message], None]:
        """`receive` as a callback of the loop, which would log what it raises and go on."""

        def call(message: Message) -> None:
            try:
                receive(message)
            except Exception as error:  # a callback of the loop is an outermost frame
                self._ends.on_error(error)

        return call
