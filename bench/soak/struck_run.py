"""One run of the soak: `run.py` from its first start to its end, struck meanwhile, resumed each time it ends early."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.soak.memory import MemoryLog
from bench.soak.processes import MARK, Seen, alive, processes_of
from bench.soak.strikes import Strike

ROOT = Path(__file__).resolve().parents[2]
Clock = Callable[[], float]
TICK_SECONDS = 0.2
GONE_SECONDS = 10.0  # after any exit no process of the run may be left for longer
STOPPED = 143  # the exit code after SIGTERM
NOTHING_SAVED = re.compile(r"(no checkpoint|holds no run|no such directory)")  # the run was struck before it began


class StruckRun:
    """`struck` counts strikes by kind and whom they hit; `violations` are sentences; `exits` counts exit codes."""

    def __init__(self, directory: Path, mark: str, temporary: Path, arguments: Sequence[str]) -> None:
        """directory: the run's, which does not exist. temporary: of the processes, as TMPDIR. arguments: of run.py."""
        self.directory = directory
        self.struck: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()
        self.violations: list[str] = []
        self.memory = MemoryLog()
        self.gone_seconds: list[float] = []  # from each end of a supervisor to that of its last process
        self.stop_seconds: list[float] = []  # from each SIGTERM to the end of the supervisor
        self._mark, self._arguments = mark, list(arguments)
        self._environment = os.environ | {MARK: mark, "TMPDIR": str(temporary)}
        self._output = directory.with_name(directory.name + ".output")
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen: list[tuple[float, Seen]] = []  # until when
        self._asked_to_stop = math.inf  # when
        self._was_killed = self._resumed = False

    def run(self, strikes: Iterator[Strike], until: float, patience: float, clock: Clock = time.monotonic) -> bool:
        """Until it has trained every step; whether it has. Strikes end at `until` of `clock`, and `patience` seconds
        after the last one it must be done.
        """
        self._start(["--run-dir", str(self.directory), *self._arguments])
        began, strike = clock(), next(strikes, None)
        deadline = time.monotonic() + patience
        due = began + strike.after if strike is not None else math.inf
        while True:
            self._thaw(time.monotonic())
            if self._process.poll() is not None:
                if not self._ended(self._process.returncode):
                    return self.exits["completed"] == 1
            elif time.monotonic() > deadline:
                self.violations.append(f"the run did not end within {patience:g} s after its last strike")
                self.end()
                return False
            if due <= clock() < until:
                self._strike(strike)
                strike = next(strikes, None)
                due = due + strike.after if strike is not None else math.inf
                deadline = time.monotonic() + patience
            self.memory.look(self._mark, time.monotonic())
            time.sleep(TICK_SECONDS)

    @property
    def kills(self) -> int:
        """Processes that were ended by a signal."""
        return sum(count for what, count in self.struck.items() if what.split()[0] in ("kill", "segfault"))

    def end(self) -> None:
        """Nothing of it goes on, whatever happened."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for process in processes_of(self._mark):
            process.send(signal.SIGKILL)

    def _start(self, options: Sequence[str]) -> None:
        command = [sys.executable, str(ROOT / "run.py"), *options]
        self._asked_to_stop, self._was_killed = math.inf, False
        self._resumed = options[0] == "--resume"
        with open(self._output, "ab") as output:
            output.write(f"--- {' '.join(options)}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _ended(self, code: int) -> bool:
        """The supervisor is gone: whether the run goes on."""
        asked_to_stop = self._asked_to_stop < math.inf
        if asked_to_stop and not self._was_killed:
            self.stop_seconds.append(round(time.monotonic() - self._asked_to_stop, 1))
        self._check_gone()
        self._frozen.clear()
        last = self._last_words()
        if code == 0:
            self.exits["completed"] += 1
            return False
        if self._was_killed and code == -signal.SIGKILL:
            self.exits["killed"] += 1
        elif asked_to_stop and code == STOPPED:
            self.exits["stopped"] += 1
        elif asked_to_stop and code == -signal.SIGTERM:
            self.exits["stopped before it began"] += 1
        elif self._resumed and code == 2 and NOTHING_SAVED.search(last):
            self.exits["nothing saved"] += 1
            self.directory = self.directory.with_name(self.directory.name + "+")
            self._start(["--run-dir", str(self.directory), *self._arguments])
            return True
        else:
            self.exits[f"failed with {code}"] += 1
            self.violations.append(f"the run ended with exit code {code}: {last[:500]}")
            if sum(self.exits[exit] for exit in self.exits if exit.startswith("failed")) >= 3:
                return False
        self._start(["--resume", str(self.directory)])
        return True

    def _check_gone(self) -> None:
        """Wait until every process that its supervisor left has ended."""
        began = time.monotonic()
        left = processes_of(self._mark)
        for _, process in self._frozen:
            process.send(signal.SIGCONT)
        while left and time.monotonic() - began < GONE_SECONDS:
            time.sleep(0.05)
            left = alive(left)
        self.gone_seconds.append(round(time.monotonic() - began, 2))
        if left:
            roles = ", ".join(f"{process.role} {process.pid}" for process in left)
            self.violations.append(f"{GONE_SECONDS:g} s after the supervisor there are still: {roles}")
            for process in left:
                process.send(signal.SIGKILL)

    def _last_words(self) -> str:
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else ""

    def _strike(self, strike: Strike) -> None:
        processes = processes_of(self._mark)
        if strike.hits_supervisor:
            victim = next((process for process in processes if process.pid == self._process.pid), None)
        else:
            # A keeper takes no SIGSEGV, and has no heart whose beat could be missed.
            spared = ("supervisor", "other") + (("keeper",) if strike.kind in ("segfault", "hang") else ())
            workers = [one for one in processes if one.role not in spared]
            victim = strike.victim(sorted(workers, key=lambda one: (one.role, one.created)))
        if victim is None:
            self.struck["nobody there"] += 1
            return
        match strike.kind:
            case "kill" | "kill_supervisor":
                hit = victim.send(signal.SIGKILL)
                self._was_killed |= strike.hits_supervisor
            case "segfault":
                hit = victim.send(signal.SIGSEGV)
            case "hang":
                hit = victim.send(signal.SIGSTOP)
            case "freeze" | "freeze_supervisor":
                hit = victim.send(signal.SIGSTOP)
                self._frozen.append((time.monotonic() + strike.seconds, victim))
            case "stop_supervisor":
                hit = victim.send(signal.SIGTERM)
                self._asked_to_stop = min(self._asked_to_stop, time.monotonic())
            case _:
                raise BenchError(f"there is no strike {strike.kind}")
        kind = strike.kind.removesuffix("_supervisor")
        self.struck[f"{kind} {victim.role}" if hit else "nobody there"] += 1

    def _thaw(self, now: float) -> None:
        for until, process in [one for one in self._frozen if one[0] <= now]:
            process.send(signal.SIGCONT)
            self._frozen.remove((until, process))
