"""Who of a run's processes stands still: told within seconds, killed only after `worker_timeout`.

A busy machine is no reason to kill. So a process that is stopped, spins or is silent is named first, in a warning and
in what the run says it waits for; when it gets on again, that is all. What it is killed for is told with its death. An
end that the loop was not told of is noticed here as well, and a place that stays empty is named.
Environment processes are watched, too, but users' code that holds one's loop is `environment_timeout`'s affair.
"""

import time
from collections.abc import Callable, Mapping

from pipeline.processes.worker.run_workers import RunWorkers, process_name
from pipeline.processes.worker.stillness import MOST_SECONDS, NAMED_SECONDS, Phase, Sight, Stillness
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.user_warnings import warn_of_run
from shm.errors import LedgerError
from shm.ledger import WorkerRow
from workers.processes.process_stat import bytes_moved, read_stat


class WorkerWatch:
    """For one run; `look` about once a second."""

    def __init__(
        self,
        workers: RunWorkers,
        rows: Mapping[str, WorkerRow],
        worker_timeout: float,
        at_work: Callable[[WorkerHandle], str | None],
        *,
        tell: Callable[[str], None] = warn_of_run,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rows: of all processes, by name. at_work(handle): whose code holds up an environment process, such as
        "on_turn of trajectory 3.1"; None: nobody's.
        """
        self._timeout = worker_timeout
        self._at_work = at_work
        self._tell = tell
        self._clock = clock
        self._looked = clock()
        self._workers = workers
        self._watched = [_Watched(handle, rows[process_name(handle)]) for handle in workers.all]
        self._methods_told: set[str] = set()

    @property
    def standing_still(self) -> str:
        """Who does, what it does instead, and what comes of it; empty: nobody."""
        return "; ".join(one.sentence for one in self._watched if one.sentence)

    def stopped_seconds(self, handle: WorkerHandle) -> float:
        """For how long somebody has stopped its process (SIGSTOP, a debugger); 0: nobody has."""
        one = self._of(handle)
        return one.stillness.seconds if handle.started and one.stillness.halted else 0.0

    def stands_still(self, handle: WorkerHandle) -> bool:
        """Whether its process does not get on."""
        return bool(self._of(handle).sentence)

    def _of(self, handle: WorkerHandle) -> "_Watched":
        (one,) = (one for one in self._watched if one.handle is handle)
        return one

    def look(self) -> None:
        """Tell who has begun to stand still, or gets on again, and kill who has done so for too long; their end is then
        told like any other death.
        """
        now = self._clock()
        seconds, self._looked = now - self._looked, now
        for one in self._watched:
            one.handle.notice_end()
            if one.handle.started:
                one.see(seconds)
                self._judge(one)
            else:  # dead, and not replaced yet
                one.sentence = ""
                self._judge_absence(one, seconds)

    def _judge(self, one: "_Watched") -> None:
        still = one.stillness
        if not still.is_named:
            if one.told and still.seconds == 0.0:
                self._tell(f"The {one.handle.name} (pid {one.handle.pid}) gets on again.")
                one.got_on()
            one.sentence = ""
            return
        code = None if still.halted else self._at_work(one.handle)
        one.sentence = f"the {one.handle.name} (pid {one.handle.pid}) {self._words(one, code)}"
        if code is None and still.seconds >= self._timeout:
            one.handle.kill(f"{still.words}, and worker_timeout is {self._timeout:g} s")
        elif code is not None:
            method = code.partition(" of ")[0]
            if method not in self._methods_told:  # once a run: whoever writes long plain functions knows it then
                self._methods_told.add(method)
                self._tell(f"{one.sentence[0].upper()}{one.sentence[1:]}.")
        elif not one.told and (still.halted or still.seconds >= one.patience):
            one.told = True
            self._tell(f"{one.sentence[0].upper()}{one.sentence[1:]}.")

    def _judge_absence(self, one: "_Watched", seconds: float) -> None:
        """It may be well: whoever is to bring the successor so far is reading a checkpoint still."""
        one.absent_seconds += min(seconds, MOST_SECONDS)
        if self._workers.failure is None and one.absent_seconds >= NAMED_SECONDS:
            one.sentence = f"the {one.handle.name} has ended, and has had no successor for {one.absent_seconds:.0f} s"
            if not one.absence_told:
                one.absence_told = True
                self._tell(f"{one.sentence[0].upper()}{one.sentence[1:]}.")

    def _words(self, one: "_Watched", code: str | None) -> str:
        if code is not None:
            return f"has been at {code} for {one.stillness.seconds:.0f} s and runs nothing else meanwhile"
        sooner = ", or when a call there has used up environment_timeout" if one.handle.role == "environment" else ""
        return f"{one.stillness.words}; it is killed and replaced after worker_timeout = {self._timeout:g} s{sooner}"


class _Watched:
    """One process's place. sentence: what is told of whoever holds it now, if it stands still."""

    def __init__(self, handle: WorkerHandle, row: WorkerRow) -> None:
        self.handle = handle
        self.row = row
        self.stillness = Stillness()
        self.sentence = ""
        self.told = self.absence_told = False
        self.absent_seconds = 0.0  # since there was a process here
        self._incarnation = handle.incarnation
        self.patience = NAMED_SECONDS  # before a warning of one that is not stopped; the waits tell it earlier

    def see(self, seconds: float) -> None:
        """Look at it, `seconds` after the look before."""
        if self._incarnation != self.handle.incarnation:  # nothing was told of this process
            self._incarnation, self.told, self.absence_told = self.handle.incarnation, False, False
        self.absent_seconds = 0.0
        self.stillness.see(self._sight(), seconds)

    def got_on(self) -> None:
        """It was silent for a while, and well: the next time it is given longer."""
        self.told = False
        self.patience *= 2.0

    def _sight(self) -> Sight:
        handle = self.handle
        heartbeat_ns = self._heartbeat_ns()
        stat = read_stat(handle.pid)
        if handle.is_starting:
            return Sight(handle.incarnation, Phase.STARTING, heartbeat_ns, stat, bytes_moved(handle.pid))
        serves = handle.ready and heartbeat_ns > 0
        return Sight(handle.incarnation, Phase.SERVING if serves else Phase.IDLE, heartbeat_ns, stat)

    def _heartbeat_ns(self) -> int:
        """0 before this incarnation has introduced itself."""
        try:
            found = self.row.read()
        except LedgerError:  # it was halted in the middle of its introduction
            return 0
        return found.heartbeat_ns if found.pid == self.handle.pid else 0
