"""What a run does about environments that hang, and environment processes that die.

A host ends by itself what takes too long. What it can't end (see `environment_culprit.py`) has its process killed, and
another one takes its place: the trajectory that held it up fails, all others there start again, or go on from what is
known of them. Where environments run in a thread of this process, nothing can be killed: the run ends.
"""

import os
from collections.abc import Awaitable, Callable, Mapping

from pipeline.environments.activity import ActivityBoard, Entry, Look, now_ns
from pipeline.errors import RunError
from pipeline.processes.environment.environment_client import EnvironmentClient, name_of
from pipeline.processes.environment.environment_culprit import Verdict, judge
from pipeline.processes.environment.log_limit import limit_log
from pipeline.processes.worker.restarts import Restarts
from pipeline.processes.worker.worker_handle import WorkerHandle
from workers.errors import WorkerDied
from workers.processes.process_stat import processor_ticks, read_stat

GRACE_SECONDS = 10.0  # beyond environment_timeout: more than a host gives a call that it has cancelled
STEP_GRACE_SECONDS = 1.0  # for a call that holds its host's loop, so that nobody can cancel it


class EnvironmentWatch:
    """For one run. boards: of its hosts, each of which has a process in `handles`, or none if it is a thread.

    `num_log_cuts` is how often one's log had become too long.
    """

    def __init__(
        self,
        client: EnvironmentClient,
        boards: list[ActivityBoard],
        handles: list[WorkerHandle],
        restarts: Restarts,
        *,
        timeout: float,
        silence: float,
        log_dir: str,
        fail: Callable[[BaseException], None],
    ) -> None:
        """timeout: seconds that a call may take. silence: seconds for which a host's loop may stand still. fail(error)
        ends the run.
        """
        self.num_log_cuts = 0
        self._client = client
        self._boards = boards
        self._handles = handles
        self._restarts = restarts
        self._timeout = timeout
        self._silence = silence
        self._log_dir = log_dir
        self._fail = fail
        self._looks: dict[int, tuple[Look, dict[int, int]]] = {}  # by host, with its threads' ticks
        # Whom we have killed: by host, why, and what fails with which sentence.
        self._killed: dict[int, tuple[WorkerDied, dict[int, str]]] = {}

    def look(self) -> None:
        """Once a second: end what hangs. The death that follows comes to `replace` like any other."""
        for host, board in enumerate(self._boards):
            handle = self._handles[host] if self._handles else None
            if handle is not None and (not handle.ready or host in self._killed):
                self._looks.pop(host, None)
                continue
            pid = os.getpid() if handle is None else handle.pid
            look = board.look()
            ticks = processor_ticks(pid, {entry.thread for entry in look.everyone})
            if host in self._looks:
                before, ticks_before = self._looks[host]
                verdict = judge(
                    before,
                    look,
                    now_ns=now_ns(),
                    limit_ns=round((self._timeout + GRACE_SECONDS) * 1e9),
                    step_ns=round((self._timeout + min(STEP_GRACE_SECONDS, GRACE_SECONDS)) * 1e9),
                    silence_ns=round((self._silence + GRACE_SECONDS) * 1e9),
                    busy_threads=_busiest(ticks_before, ticks),
                    halted=read_stat(pid).halted,
                )
                if verdict is not None:
                    self._end(host, verdict)
            self._looks[host] = look, ticks
            if handle is not None:
                self.num_log_cuts += limit_log(handle.log_path(self._log_dir))
        overdue = self._client.overdue(self._timeout + GRACE_SECONDS)
        if overdue is not None:
            self._fail(RunError(f"The answer of an environment is lost: {overdue}, though its process is there."))

    def at_work(self, host: int) -> str | None:
        """Whose code the host's loop is in, or else runs beside it, as "on_turn of trajectory 3.1"; None: nobody's."""
        entries = self._boards[host].look().everyone
        return self._where(entries[0]) if entries else None

    async def replace(self, host: int, error: WorkerDied, start: Callable[[], Awaitable[None]]) -> None:
        """The process of `host` is gone, as `error` says: tell its trajectories, and have another one serve, which
        `start` brings so far.
        """
        failed: dict[int, str] = {}
        suspects = [entry.request for entry in self._boards[host].look().everyone]
        if host in self._killed:
            error, failed = self._killed.pop(host)
            suspects = [] if failed else suspects  # nobody is blamed: whoever halts it again and again is found
        self._client.lost(host, str(error), failed, suspects)
        await self._restarts.restart(self._handles[host], start, error, is_accident=not failed and not suspects)

    def _end(self, host: int, verdict: Verdict) -> None:
        sentences = {entry.request: self._sentence(entry, verdict) for entry in verdict.blamed}
        why = "; ".join(dict.fromkeys(sentences.values())) or f"its event loop {verdict.why}"
        if self._handles:
            handle = self._handles[host]
            self._killed[host] = WorkerDied(f"The {handle.name} (pid {handle.pid}) was killed: {why}."), sentences
            handle.kill()
        elif not verdict.loop_runs:  # a thread that goes on beside the others harms nobody
            self._fail(
                RunError(
                    f"An environment hangs: {why}. It runs in a thread of this process, which can't be ended: write "
                    "its class in a module of its own, await what takes long, or raise environment_timeout."
                )
            )

    def _sentence(self, entry: Entry, verdict: Verdict) -> str:
        where = self._where(entry)
        if self._timeout != self._silence:  # an agent's: it may take long, but not let nothing else run meanwhile
            return f"{where} let no other agent run for half of idle_timeout, {self._silence:g} s, and {verdict.why}"
        return f"{where} took longer than environment_timeout = {self._timeout:g} s, and {verdict.why}"

    def _where(self, entry: Entry) -> str:
        call = self._client.call_of(entry.request)
        return f"{entry.method} of a trajectory that has ended" if call is None else name_of(call, entry.method)


def _busiest(before: Mapping[int, int], ticks: Mapping[int, int]) -> set[int]:
    """The threads that used the processor between two looks; not those that only woke to see that they can't go on."""
    used = {thread: count - before.get(thread, count) for thread, count in ticks.items()}
    most = max(used.values(), default=0)
    return {thread for thread, count in used.items() if count and 2 * count >= most}
