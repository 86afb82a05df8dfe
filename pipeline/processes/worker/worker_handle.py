"""One worker's place: the process that holds it now, its link, and its replacement after a death."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import zmq

from pipeline.errors import RunError
from workers.channel import SupervisorLink
from workers.errors import WorkerDied, WorkerFailed
from workers.messages import EndRun, Failed, Hello, Message, Ready, RunEnded, Start, Stop
from workers.processes.process import WorkerProcess
from workers.processes.process_stat import read_stat
from workers.processes.sockets import RUN_FILES, SocketDirectory
from workers.processes.stacks import StackMemory

READY_SECONDS = 1800.0  # bound on start-up: imports, and 100 GB of weights from a disk of 60 MB/s
END_SECONDS = 5.5  # for a worker to finish what it is at and close a run's memory; then it is killed
USER_CODE_END_SECONDS = 5.5  # the same for an environment process, which cancels and closes users' calls meanwhile
AT_ONCE_SECONDS = 1.0  # the same when someone has asked twice for the end: what it is at is of no use any more


class WorkerHandle:
    """Starts, watches and ends one worker process; survives its incarnations.

    `on_message` gets everything after Ready; `on_death(error)` is called once when the process ends unasked and no
    `start` is there to raise it, after it was reaped; `on_error(error)` gets what `on_message` raises. Belongs to the
    main thread; within a run, to its asyncio loop.
    """

    def __init__(self, role: str, index: int, module: str, threads: int) -> None:
        self.role = role
        self.index = index
        self.incarnation = -1
        self._module = module
        self._threads = threads
        self._process: WorkerProcess | None = None
        self._link: SupervisorLink | None = None
        self._ready: asyncio.Future[dict] | None = None
        self._run_ended: asyncio.Future[None] | None = None
        self._death: WorkerDied | None = None  # of the latest incarnation
        self._hello = False
        self.ready = False  # it has answered its latest start message
        self._pending_start: Start | None = None
        self._failed: Failed | None = None
        self._killed_for: str | None = None
        self._watched_by: asyncio.AbstractEventLoop | None = None
        self.on_message: Callable[[Message], None] = lambda message: None
        self.on_death: Callable[[WorkerDied], None] = lambda error: None
        self.on_error: Callable[[Exception], None] = lambda error: None

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def is_starting(self) -> bool:
        """Whether it imports what it runs, or makes ready for what its start message says."""
        return self.started and (not self._hello or self._ready is not None)

    @property
    def stacks(self) -> StackMemory | None:
        """By which it can be asked for its Python stacks; None: there is no process."""
        return self._process.stacks if self._process is not None else None

    def ask_for_stacks(self) -> bool:
        """Have the process write its Python stacks into `stacks`; False: there is none, or it can't yet."""
        return self._process is not None and self._process.stacks.ask(self.pid)

    def socket_state(self) -> dict[str, Any]:
        """For a report."""
        return self._link.state() if self._link is not None else {}

    def log_path(self, log_dir: str) -> str:
        """Where it writes what it prints in a run with this directory for logs."""
        return os.path.abspath(os.path.join(log_dir, f"{self.role}-{self.index}.log"))

    def spawn(self, context: zmq.Context, sockets: SocketDirectory, log_dir: str) -> None:
        """Start a new incarnation; the one before must have been reaped (`discard`)."""
        self.incarnation += 1
        self._hello, self._failed, self._pending_start, self._death = False, None, None, None
        self._killed_for = None
        endpoint = sockets.endpoint(f"{self.role}-{self.index}.{self.incarnation}")
        self._link = SupervisorLink(context, endpoint, self.incarnation, self.name)
        threads = str(self._threads)
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, RUN_FILES: sockets.mark}
        try:
            self._process = WorkerProcess(
                self._module,
                endpoint,
                self.incarnation,
                self.log_path(log_dir),
                variables,
                is_kept=self.role == "environment",  # users' code may start anything
            )
        except BaseException:
            self.discard()
            raise

    def attach(self) -> None:
        """Deliver messages and watch for the process's end in the running loop."""
        self._link.attach(self._receive, lambda error: self.on_error(error))
        self._watched_by = asyncio.get_running_loop()
        self._watched_by.add_reader(self._process.sentinel, self._ended)

    def detach(self) -> None:
        """The run's loop ends; the process stays, idle."""
        if self._watched_by is not None and not self._watched_by.is_closed():
            self._watched_by.remove_reader(self._process.sentinel)
        self._watched_by = None
        if self._link is not None:
            self._link.detach()
        self.on_message = lambda message: None
        self.on_death = self.on_error = lambda error: None

    async def start(self, config: dict, log_dir: str) -> dict:
        """Send the run's config and wait for Ready; returns its detail. Raises WorkerDied, also when it is dead
        already, what `give_up` was told, or RunError after a time.
        """
        self._check_alive()
        self._process.log_to(self.log_path(log_dir))
        config = config | {"log_path": self._process.log_path}
        self.ready = False
        self._ready = asyncio.get_running_loop().create_future()
        if self._hello:
            self._link.send(Start(config=config))
        else:
            self._pending_start = Start(config=config)
        try:
            async with asyncio.timeout(READY_SECONDS):
                detail = await asyncio.shield(self._ready)
        except TimeoutError:
            raise RunError(
                f"The {self.name} (pid {self.pid}) was not ready {READY_SECONDS:g} s after its start; "
                f"see {self.log_path(log_dir)}."
            ) from None
        finally:
            self._ready = None
        self._check_alive()  # it may have died right after its Ready
        return detail

    def give_up(self, error: Exception) -> None:
        """Whoever waits in `start` gets `error`."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)

    async def end_run(self, at_once: bool) -> None:
        """Have it close what the run has opened; a process that can't do so in END_SECONDS (USER_CODE_END_SECONDS,
        AT_ONCE_SECONDS) is killed, one that somebody has stopped (SIGSTOP) at once.
        """
        if not (self.started and self.ready):
            return
        if read_stat(self.pid).halted:
            self.discard()
            return
        self._run_ended = asyncio.get_running_loop().create_future()
        self._link.send(EndRun())
        try:
            async with asyncio.timeout(AT_ONCE_SECONDS if at_once else self._end_seconds):
                await self._run_ended
        except TimeoutError:
            self.discard()
        finally:
            self._run_ended = None

    @property
    def _end_seconds(self) -> float:
        return USER_CODE_END_SECONDS if self.role == "environment" else END_SECONDS

    def send(self, message: Message) -> None:
        """Messages to a process that is down are dropped: whoever asked is told by `on_death`."""
        if self._link is not None:
            self._link.send(message)

    def kill(self, why: str | None = None) -> None:
        """SIGKILL; its end is then told like any other. why: what it "has" done, for the sentence that tells it."""
        if self._process is not None:
            self._killed_for = why
            self._process.kill()

    def ask_to_stop(self) -> None:
        if self._link is not None:
            self._link.send(Stop())

    def wait(self, timeout_seconds: float) -> bool:
        return self._process is None or self._process.wait(timeout_seconds)

    def notice_end(self) -> None:
        """In a run: tell of it now, if the loop has not (a fork of users' code shares what the loop waits with, and can
        take a sentinel out of it).
        """
        if self._watched_by is not None and self._process is not None and not self._process.alive:
            self._ended()

    def discard_if_dead(self) -> None:
        """A process that ended while nobody watched makes room for a new one."""
        if self._process is not None and not self._process.alive:
            self.discard()

    def discard(self) -> None:
        """Kill and reap the process, close its link. Idempotent."""
        self.detach()
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.close()
        self._process = self._link = None
        self.ready = False

    def _receive(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._hello = True
            if self._pending_start is not None:
                self._link.send(self._pending_start)
                self._pending_start = None
        elif isinstance(message, Failed):
            self._failed = message  # the reason; the death itself is told by the sentinel
        elif isinstance(message, Ready):
            self.ready = True
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message.detail)
        elif isinstance(message, RunEnded):
            if self._run_ended is not None and not self._run_ended.done():
                self._run_ended.set_result(None)
        elif self._ready is None:  # while a new run's Ready is awaited, what comes belongs to the run before
            self.on_message(message)

    def _ended(self) -> None:
        """The sentinel fired, and does so until it is closed, whatever goes wrong on the way."""
        on_error = self.on_error
        try:
            self._tell_end()
        except Exception as error:  # a callback of the loop is an outermost frame
            self.discard()
            on_error(error)

    def _tell_end(self) -> None:
        """Read its last messages, reap it, tell."""
        process, on_death = self._process, self.on_death
        process.wait(5.0)
        self._link.drain()
        if self._failed is not None:
            kind = WorkerFailed if self._failed.is_final else WorkerDied
            error = kind(f"The {self.name} stopped: {self._failed.why}")
        else:
            said = process.last_words()
            words = f" Its last words: {said}" if said else ""
            end = process.describe_end() if self._killed_for is None else f"was killed: it {self._killed_for}"
            error = WorkerDied(f"The {self.name} (pid {process.pid}) {end}.{words}", by_signal=process.ended_by_signal)
        ready, self._death = self._ready, error
        if self._run_ended is not None and not self._run_ended.done():
            self._run_ended.set_result(None)
        self.discard()
        if ready is not None and not ready.done():
            ready.set_exception(error)
        else:
            on_death(error)

    def _check_alive(self) -> None:
        if self._process is None:
            raise self._death or WorkerDied(f"The {self.name} is not running.")
