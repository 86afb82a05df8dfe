"""run.py as a user starts it: a process of its own, with directories of its own, and what is left of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from pipeline.processes.worker.run_workers import MODULES
from workers.processes import keeper

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--groups-per-step", "2", "--group-size", "4")  # quick, and enough for every code path
PATIENCE_SECONDS = 60.0  # bound on every wait here; nothing is decided by it but how a failure looks


class RunFiles:
    """What a run of the command line writes."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def lines(self, name: str) -> list[dict]:
        """The whole lines of metrics.jsonl or events.jsonl so far."""
        path = self.run_dir / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if "\n" in line]

    def events(self, kind: str) -> list[dict]:
        return [event for event in self.lines("events.jsonl") if event["event"] == kind]

    def record(self) -> dict:
        """config.json."""
        return json.loads((self.run_dir / "config.json").read_text(encoding="utf-8"))


class RunPy(RunFiles):
    """One started `python run.py`; its output is kept in files. In a session of its own, as on a terminal; on_terminal:
    really on one, to which stdout goes.
    """

    def __init__(
        self, run_dir: Path, temporary: str, *arguments: str, script: Path | None = None, on_terminal: bool = False
    ) -> None:
        super().__init__(run_dir)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._out, self._err = (Path(f"{run_dir}.{name}") for name in ("stdout", "stderr"))
        command = [sys.executable, str(script or ROOT / "run.py"), *arguments]
        if script is None:
            command += [*SMALL, "--device", "cpu", "--run-dir", str(run_dir)]
        self._terminal: subprocess.Popen | None = None
        stdin = subprocess.DEVNULL
        with open(self._out, "w") as out, open(self._err, "w") as err, contextlib.ExitStack() as opened:
            if on_terminal:
                ours, stdin = os.openpty()
                opened.callback(os.close, stdin)
                # Whoever reads what it shows holds it open, and nobody else does.
                self._terminal = subprocess.Popen(["cat"], stdin=ours, stdout=out)
                os.close(ours)
                # The first terminal that the first process of a session opens is that session's.
                command = ["sh", "-c", 'exec >"$0"; exec "$@"', os.ttyname(stdin), *command]
            self.process = subprocess.Popen(
                command,
                cwd=run_dir.parent,
                env=os.environ | {"TMPDIR": temporary},
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8")

    def wait_until(self, condition, what: str) -> None:
        """Look until `condition()`; fails when the run ends first, or after PATIENCE_SECONDS."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}: {self.stdout}{self.stderr}"
            assert time.monotonic() < deadline, f"no {what} within {PATIENCE_SECONDS:g} s: {self.stdout}{self.stderr}"
            time.sleep(0.02)

    def wait_for_steps(self, steps: int) -> None:
        self.wait_until(lambda: len(self.lines("metrics.jsonl")) >= steps, f"step {steps}")

    def workers(self) -> dict[str, psutil.Process]:
        """Its running worker processes by module; not their keepers."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = child.cmdline()
                    if keeper.__file__ not in words:
                        found |= {module: child for module in MODULES.values() if module in words}
        return found

    def wait_for_workers(self) -> dict[str, psutil.Process]:
        self.wait_until(lambda: len(self.workers()) == len(MODULES), "worker of every kind")
        return self.workers()

    def close_terminal(self) -> None:
        """As a window is closed, or a line lost: the kernel sends SIGHUP, and nothing can be printed any more."""
        self._terminal.kill()
        self._terminal.wait()

    def press_ctrl_c(self) -> None:
        """SIGINT to the whole process group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def end(self) -> None:
        """Whatever the test did: nothing of it goes on."""
        for process in filter(None, (self.process, self._terminal)):
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_until_gone(processes, seconds: float) -> None:
    """Fails when one of `processes` still runs after `seconds`."""
    _, alive = psutil.wait_procs(list(processes), timeout=seconds)
    assert not alive, f"still running: {alive}"


def audit(run_dir: Path) -> subprocess.CompletedProcess:
    """What `headway audit RUN_DIR` says, by the audit's file alone: it needs nothing else of ours."""
    command = [sys.executable, "-P", str(ROOT / "pipeline" / "audit.py"), str(run_dir / "events.jsonl")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def socket_directories(temporary):
    return sorted(Path(temporary).glob("headway-*"))


def assert_ended(run, code, status, temporary):
    """Exit code, the audit log's last word, its audit, and nothing left behind."""
    assert (run.wait(), run.stderr) == (code, "")
    (end,) = run.events("end")
    assert end["status"] == status
    assert audit(run.run_dir).returncode == 0
    assert socket_directories(temporary) == []
    return end


def check_whole(run, steps, resumed):
    """Trained to its end, as if it had never been interrupted: batches, versions, times and the audit."""
    assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, steps + 1))
    assert [event["step"] for event in run.events("batch")] == list(range(1, steps + 1))
    published = [event["version"] for event in run.events("published") if event["version"]]
    assert sorted(set(published)) == list(range(1, run.lines("metrics.jsonl")[-1]["model_step"] + 1))
    assert [event.get("resumed", 0) for event in run.events("run")] == list(range(resumed + 1))
    times = [event["t"] for event in run.lines("events.jsonl")]
    assert times == sorted(times)
    trained = [group for event in run.events("batch") for group in event["groups"]]
    assert len(trained) == len(set(trained)) == steps * int(SMALL[1])
    end = run.events("end")[-1]
    assert (end["status"], end["steps"]) == ("completed", steps)
    done = audit(run.run_dir)
    assert done.returncode == 0, done.stdout


@contextlib.contextmanager
def when_written(run_dir, *names, then):
    """Beside the block, in a thread: as soon as each of the run's files has a line, call then()."""
    run, left = RunFiles(run_dir), threading.Event()

    def watch():
        while not all(run.lines(name) for name in names):
            if left.wait(0.01):
                return
        then()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        left.set()
        watching.join()
