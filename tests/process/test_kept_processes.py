"""What users' code starts ends with its process, however that, its keeper or the supervisor ends; nobody else does."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from workers.processes import keeper
from workers.processes.leftovers import WORKER, end_marked
from workers.processes.process import end_kept, start_kept, told_pid

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60.0  # bound on every wait
MARK = "ipc:///test/environment-0.0"

# It starts a child as programs do, one with a session and an environment of its own, and one that has left its parent
# (a daemon), which has a child of its own; tells their process ids, and ends when its stdin does.
PROGRAM = """
import os, subprocess, sys
SLEEP = ["/bin/sleep", "1000"]
own = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, env={})
plain = subprocess.Popen(SLEEP, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
apart = subprocess.Popen(SLEEP, **own)
daemon = "import os, subprocess, sys; own = dict(stdout=subprocess.DEVNULL, start_new_session=True, env={}); " + (
    "child = subprocess.Popen(['/bin/sh', '-c', 'sleep 1000 & echo $! >&2; wait'], stderr=subprocess.PIPE, **own); "
    "print(child.pid, int(child.stderr.readline()))"
)
daemon = [sys.executable, "-I", "-S", "-c", daemon]
told = subprocess.run(daemon, stdin=subprocess.DEVNULL, capture_output=True, check=True)
print(os.getpid(), plain.pid, apart.pid, *told.stdout.decode().split(), flush=True)
how = sys.stdin.readline().strip()
if how == "segfault":
    os.kill(os.getpid(), 11)
os._exit(int(how or 0))
"""
STARTER = f"""
import subprocess, sys
from workers.processes.process import start_kept
kept, told = start_kept([sys.executable, "-I", "-S", "-c", {PROGRAM!r}], stdin=subprocess.PIPE, start_new_session=True)
print(kept.pid, flush=True)
sys.stdin.read()
"""


class Kept:
    """The program under its keeper; all that it starts is in `everyone`, itself first."""

    def __init__(self):
        self.keeper, self.told = start_kept(
            [sys.executable, "-I", "-S", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {WORKER: MARK},
        )
        self.everyone = [psutil.Process(int(pid)) for pid in self.keeper.stdout.readline().split()]

    def ended(self):
        """The keeper's exit status as Popen gives it."""
        return self.keeper.wait(SECONDS)

    def close(self):
        for process in [psutil.Process(self.keeper.pid), *self.everyone] if self.keeper.returncode is None else []:
            process.kill()
        self.keeper.communicate()
        os.close(self.told)


@pytest.fixture
def kept():
    kept = Kept()
    yield kept
    kept.close()


def alive(processes):
    """Those that are there; a process that waits for init to reap it is gone."""
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(processes):
    deadline = time.monotonic() + SECONDS
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive(processes) == []


def test_the_keeper_tells_whom_it_keeps(kept):
    assert told_pid(kept.told, SECONDS) == kept.everyone[0].pid
    assert kept.everyone[0].ppid() == kept.keeper.pid
    assert len(kept.everyone) == len(alive(kept.everyone)) == 5  # the test's premise


@pytest.mark.parametrize(("how", "status"), [("0", 0), ("3", 3), ("segfault", -signal.SIGSEGV)])
def test_nothing_is_left_of_a_program_that_ends_and_its_keeper_ends_alike(kept, how, status):
    kept.keeper.stdin.write(how.encode() + b"\n")
    kept.keeper.stdin.flush()
    assert kept.ended() == status
    assert alive(kept.everyone) == []


def test_nothing_is_left_of_a_program_that_is_killed(kept):
    kept.everyone[0].kill()
    assert kept.ended() == -signal.SIGKILL
    assert alive(kept.everyone) == []


@pytest.mark.parametrize("halted", [False, True])
def test_a_keeper_ends_all_when_it_is_told_to(kept, halted):
    if halted:
        for process in [psutil.Process(kept.keeper.pid), *kept.everyone]:
            process.suspend()
    end_kept(kept.keeper)
    assert kept.ended() == -signal.SIGKILL
    assert alive(kept.everyone) == []


def test_nothing_is_left_when_the_starter_is_killed():
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    everyone = []
    try:
        keeper = psutil.Process(int(starter.stdout.readline()))
        everyone = [keeper, *(psutil.Process(int(pid)) for pid in starter.stdout.readline().split())]
        assert len(alive(everyone)) == 6
        starter.kill()
        starter.wait()
        wait_until_gone(everyone)
    finally:
        starter.kill()
        starter.communicate()
        for process in alive(everyone):
            process.kill()


def test_what_a_killed_keeper_leaves_is_found_by_its_mark(kept):
    """But for children that were given an environment of their own: they are the keeper's business alone."""
    other = subprocess.Popen(["/bin/sleep", "1000"], env={WORKER: MARK + "0"})
    own_words = subprocess.Popen(["/bin/sleep", "1000"], env={"SAID": f"{WORKER}={MARK}"})
    try:
        os.kill(kept.keeper.pid, signal.SIGKILL)
        assert kept.ended() == -signal.SIGKILL
        marked = {process.pid for process in kept.everyone if process.is_running() and has_mark(process)}
        assert marked  # the plain child at least
        assert marked <= set(end_marked(WORKER, MARK))
        assert [process for process in alive(kept.everyone) if has_mark(process)] == []
        assert other.poll() is None and own_words.poll() is None
    finally:
        for process in (other, own_words):
            process.kill()
            process.wait()
        for process in alive(kept.everyone):
            process.kill()


def test_this_process_and_those_above_it_are_spared():
    """A run that was started by a process of another one, whose supervisor was killed, sweeps that one's files."""
    code = f"from workers.processes.leftovers import end_marked; print(end_marked({WORKER!r}, {MARK!r}))"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {WORKER: MARK}, capture_output=True, text=True
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, "[]\n", "")


def test_a_keeper_without_its_starter_starts_nothing():
    """The starter died before the keeper could ask to be told."""
    told, tells = os.pipe()
    command = [sys.executable, "-I", "-S", keeper.__file__, "1", str(tells), "/bin/sleep", "1000"]
    process = subprocess.Popen(command, pass_fds=[tells])
    os.close(tells)
    try:
        assert process.wait(SECONDS) == 1
        assert select.select([told], [], [], SECONDS)[0] and told_pid(told, 0) is None
    finally:
        os.close(told)


def has_mark(process):
    try:
        return process.environ().get(WORKER) == MARK
    except psutil.NoSuchProcess:
        return False
