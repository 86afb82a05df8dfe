"""Worker processes by themselves: where they stand, what they are deaf to, with whom they die, what they say last."""

import asyncio
import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import zmq

from pipeline.environments.activity import NUM_BYTES, ActivityBoard
from shm.block import Block
from workers.channel import SupervisorLink
from workers.errors import ChannelError
from workers.machine import limits
from workers.messages import EnvironmentCall, EnvironmentReplies, Environments, Failed, Hello, Ready, Start, Stop
from workers.processes import process
from workers.processes.process import WorkerProcess

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60.0  # bound on every wait
GONE_SECONDS = 5.0  # within which workers must be gone after their parent

# A supervisor that starts one worker of each kind, tells their pids, and then does nothing.
PARENT = """
import sys, time
from workers.processes.process import WorkerProcess

workers = [
    WorkerProcess(module, f"ipc://{sys.argv[1]}/{index}", 0, f"{sys.argv[1]}/{index}.log")
    for index, module in enumerate(("pipeline.environments.process", "workers.sampler", "workers.learner"))
]
print(*(worker.pid for worker in workers), flush=True)
time.sleep(3600)
"""

LOUD = """
from pipeline.env import Env


class Loud(Env):
    def reset(self, row):
        print("reset of", row["name"])
        return "go"

    def reward(self, traj, row):
        return 0.0
"""


@pytest.fixture
def directory():
    """For sockets and logs; its name is short."""
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as path:
        yield path


def exchange(link, until, *sent):
    """Send, and return the first message of the kind `until`."""

    async def run():
        future = asyncio.get_running_loop().create_future()

        def take(message):
            if isinstance(message, until) and not future.done():
                future.set_result(message)

        link.attach(take, future.set_exception)
        for message in sent:
            link.send(message)
        try:
            return await asyncio.wait_for(future, SECONDS)
        finally:
            link.detach()

    return asyncio.run(run())


class Worker:
    """An environment process, which starts quickest, and its link."""

    def __init__(self, directory, context):
        self.link = SupervisorLink(context, f"ipc://{directory}/link", 4, "environment 0")
        self.process = WorkerProcess("pipeline.environments.process", self.link.endpoint, 4, f"{directory}/first.log")

    def exchange(self, *sent, until=Ready):
        return exchange(self.link, until, *sent)


@pytest.fixture
def worker(directory):
    context = zmq.Context()
    worker = Worker(directory, context)
    yield worker
    worker.process.close()
    worker.link.close()
    context.term()


@pytest.fixture
def loud(tmp_path):
    """start(log path): the start message of a run whose environment prints."""
    (tmp_path / "loud.py").write_text(LOUD)

    def start(log_path, environment="loud:Loud"):
        return Start(
            config={
                "log_path": str(log_path),
                "sys_path": [str(tmp_path)],
                "environment": environment,
                "arguments": {},
                "environment_timeout": 60.0,
                "max_tool_chars": None,
                "activity": {"path": block.path, "num_bytes": block.num_bytes},
                "try_first": False,
            }
        )

    with Block.create("activity", NUM_BYTES) as block:
        ActivityBoard(block.view).format()
        yield start


def reset(name):
    return Environments(calls=[EnvironmentCall(1, 0, 0, "reset", {"row": {"name": name}, "seed": 1})])


def test_worker_has_a_session_of_its_own_and_is_deaf_to_sigint(worker, loud, tmp_path):
    hello = worker.exchange(until=Hello)
    assert (hello.role, hello.pid) == ("pipeline.environments.process", worker.process.pid)
    assert os.getsid(hello.pid) == hello.pid != os.getsid(0)
    for _ in range(3):
        os.kill(hello.pid, signal.SIGINT)
    worker.exchange(loud(tmp_path / "run.log"), until=Ready)  # it still does what it is told
    assert worker.process.alive and worker.process.describe_end() == "is still running"


def test_each_run_has_a_log_of_its_own(worker, loud, directory, tmp_path):
    worker.exchange(until=Hello)
    for name in ("first run", "second run"):
        worker.exchange(loud(tmp_path / f"{name}.log"), until=Ready)
        (reply,) = worker.exchange(reset(name), until=EnvironmentReplies).replies
        assert reply.error is None
    worker.link.send(Stop())
    assert worker.process.wait(SECONDS)
    assert worker.process.describe_end() == "ended with status 0"
    for name in ("first run", "second run"):
        assert (tmp_path / f"{name}.log").read_text() == f"reset of {name}\n"
    assert Path(directory, "first.log").read_text() == ""  # what it says before its first run


def test_last_words_come_in_a_message_and_in_the_log(worker, loud, tmp_path):
    worker.exchange(until=Hello)
    failed = worker.exchange(loud(tmp_path / "run.log", environment="nosuch:Env"), until=Failed)
    assert failed.why.startswith("The environment 'nosuch:Env' can't be imported: there is no module nosuch")
    assert worker.process.wait(SECONDS)
    assert worker.process.describe_end() == "ended with status 1"
    log = (tmp_path / "run.log").read_text()
    assert "Traceback" in log and "nosuch" in log


def test_last_words_are_not_those_of_an_earlier_process(directory):
    log = Path(directory, "log")
    log.write_text("said by an earlier one\n", encoding="utf-8")
    worker = WorkerProcess("workers.learner", f"ipc://{directory}/nobody", 0, str(log))
    other = Path(directory, "other")
    other.write_text("said in an earlier run\n", encoding="utf-8")
    try:
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.wait(SECONDS) and worker.last_words() == ""
        with open(log, "a", encoding="utf-8") as file:
            file.write("said by this one\n")
        assert worker.last_words() == "said by this one"
        worker.log_to(str(other))
        assert worker.last_words() == ""
    finally:
        worker.close()


def test_last_words_come_in_a_message_though_the_logs_disk_is_full(worker, loud):
    worker.exchange(until=Hello)
    failed = worker.exchange(loud("/dev/full", environment="nosuch:Env"), until=Failed)
    assert failed.why.startswith("The environment 'nosuch:Env' can't be imported")
    assert worker.process.wait(SECONDS)
    assert worker.process.describe_end() == "ended with status 1"


def test_end_is_told_by_the_sentinel_and_in_words(worker):
    worker.exchange(until=Hello)
    assert select.select([worker.process.sentinel], [], [], 0)[0] == []
    worker.process.kill()
    assert select.select([worker.process.sentinel], [], [], SECONDS)[0] == [worker.process.sentinel]
    assert worker.process.wait(SECONDS)
    assert worker.process.describe_end() == "was killed by SIGKILL"
    worker.process.close()
    worker.process.close()


def test_a_death_of_which_the_kernel_counts_one_for_want_of_memory_says_so(worker, monkeypatch):
    worker.exchange(until=Hello)
    kills = limits.memory_kills()
    monkeypatch.setattr(process, "memory_kills", lambda: (kills or 0) + 1)
    worker.process.kill()
    assert worker.process.wait(SECONDS)
    assert worker.process.describe_end().startswith("was killed by SIGKILL, probably for want of memory: the kernel")


def test_a_process_that_the_kernel_does_not_end_is_left_to_it(worker, monkeypatch):
    """As one that waits for a dead disk: here nothing is sent to it."""
    worker.exchange(until=Hello)
    pid = worker.process.pid
    for name in ("KEEPER_END_SECONDS", "KILLED_SECONDS"):
        monkeypatch.setattr(process, name, 0.05)
    with monkeypatch.context() as patch:
        for name in ("kill", "_kill_group"):
            patch.setattr(WorkerProcess, name, lambda self: None)
        worker.process.close()
        worker.process.close()
    assert worker.process.sentinel == -1 and psutil.Process(pid).is_running()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_process_that_nobody_could_watch_is_not_left_behind(directory, monkeypatch, is_kept):
    before, files = psutil.Process().children(), os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse_descriptor)
        with pytest.raises(OSError, match="Too many"):
            WorkerProcess(
                "pipeline.environments.process", f"ipc://{directory}/link", 0, f"{directory}/log", is_kept=is_kept
            )
    assert psutil.Process().children() == before and os.listdir("/proc/self/fd") == files


def refuse_descriptor(pid):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_start_from_a_side_thread_is_refused_in_one_sentence(directory):
    errors = []

    def start():
        try:
            WorkerProcess("pipeline.environments.process", f"ipc://{directory}/link", 0, f"{directory}/log").close()
        except ChannelError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start, name="notebook")
    thread.start()
    thread.join()
    assert errors == [
        "pipeline.environments.process would be started from the thread 'notebook', and die with it; "
        "run the trainer in the main thread."
    ]
    assert os.listdir(directory) == []


def test_modules_of_the_current_directory_are_not_imported(directory, tmp_path, monkeypatch):
    for name in ("msgpack", "workers", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    monkeypatch.chdir(tmp_path)
    context = zmq.Context()
    worker = Worker(directory, context)
    try:
        assert worker.exchange(until=Hello).role == "pipeline.environments.process"
    finally:
        worker.process.close()
        worker.link.close()
        context.term()


def has_ended(process):
    """Also one that whoever takes in orphans here has not reaped yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("phase", ["as they start", "when they are up"])
def test_workers_die_with_a_parent_that_is_killed(directory, phase):
    context = zmq.Context()
    links = [SupervisorLink(context, f"ipc://{directory}/{index}", 0, f"worker {index}") for index in range(3)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, directory], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    workers = []
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        workers = [psutil.Process(pid) for pid in pids]
        if phase == "when they are up":
            for link in links:
                assert exchange(link, Hello).pid in pids
            workers[1].suspend()  # also one that can't act
        parent.kill()
        parent.wait()
        _, there = psutil.wait_procs(workers, timeout=GONE_SECONDS)
        alive = [process for process in there if not has_ended(process)]
        assert not alive, {process.pid: Path(f"/proc/{process.pid}/cmdline").read_text() for process in alive}
    finally:
        for process in workers:
            with contextlib.suppress(psutil.NoSuchProcess):  # by pid and start time
                process.kill()
        parent.kill()
        parent.communicate()
        for link in links:
            link.close()
        context.term()
