"""Faults of shared memory and queues that users of other systems met: HR52, HR53, HR55 and HR56."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import zmq

from shm.block import Block
from shm.errors import BlockError
from tests.shared_files import shared_memory_files
from workers.channel import SupervisorLink
from workers.messages import Failed
from workers.processes.sockets import sweep

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60.0  # bound on every wait
GONE_SECONDS = 5.0  # within which every process has to end when its supervisor has
NUM_KILLS, NUM_RUNS = 50, 20


@pytest.fixture
def base():
    """An empty directory for temporary files, with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as path:
        yield path


@pytest.fixture
def start(base):
    """start(ROLE, ARGUMENT…): a process of ipc_children.py that doesn't outlive the test."""
    started = []

    def run(*arguments):
        command = [
            sys.executable,
            "-W",
            "error",
            str(Path(__file__).with_name("ipc_children.py")),
            *map(str, arguments),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": base}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        for pipe in (
            process.stdin,
            process.stdout,
            process.stderr,
        ):  # whoever holds its other end may live on
            pipe.close()


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_hr52_one_who_dies_attached_takes_a_block_from_nobody(start):
    before = shared_memory_files()
    with Block.create("slot-0", 1 << 20, fill=7) as block:
        dies, reads_on = (start("attach", block.path, 1 << 20) for _ in range(2))
        assert [one.stdout.readline() for one in (dies, reads_on)] == ["attached\n"] * 2
        dies.kill()
        dies.wait()
        block.view[0] = 8
        assert ask(reads_on) == "8"
        comes_later = start("attach", block.path, 1 << 20)
        assert comes_later.stdout.readline() == "attached\n" and ask(comes_later) == "8"
        path = block.path
    for reader in (reads_on, comes_later):  # its owner has let go of it: it lives until they do
        assert ask(reader) == "8"
        _, errors = reader.communicate(timeout=SECONDS)
        assert (reader.returncode, errors) == (0, "")  # warnings would be errors, and trackers tell of leaks here
    with pytest.raises(BlockError):
        Block.open(path, 1 << 20)
    assert shared_memory_files() <= before


def test_hr53_killed_runs_leave_nothing_that_grows(start, base):
    before = shared_memory_files()
    other = Path(base, "headway-of-somebody-else")
    other.mkdir()
    told, errors = start("kill_runs", NUM_RUNS, base).communicate(timeout=SECONDS)
    runs = json.loads(told)
    assert (errors, len(runs)) == ("", NUM_RUNS)
    for run in runs:  # each has swept what the one before it had left
        assert run["in base"] == sorted([other.name, os.path.basename(run["directory"])])
        for path in run["blocks"]:
            with pytest.raises(BlockError):
                Block.open(path, 1 << 20)
    assert [path for path, _ in sweep(base)] == [runs[-1]["directory"]]
    assert os.listdir(base) == [other.name]
    assert shared_memory_files() <= before
    assert not [run for run in runs if is_there(run["child"], "sleep") or is_there(run["keeper"], "keeper.py")]


def is_there(pid, word):
    """Whether a process with this word in its command has that id: by now it may be another's."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and word in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_hr55_a_producer_that_is_killed_while_it_writes_holds_up_nobody(start):
    told, errors = start("kill_producers", NUM_KILLS).communicate(timeout=SECONDS)
    assert errors == ""
    read = json.loads(told)
    assert read["of killed ones"] >= NUM_KILLS and read["of the steady one"] >= 3 * NUM_KILLS


@pytest.mark.parametrize("supervisor", ["reads nothing", "has closed its end", "was never there"])
def test_hr56_answers_that_nobody_takes_keep_no_worker_from_its_end(start, base, supervisor):
    context = zmq.Context()
    link = SupervisorLink(context, f"ipc://{base}/sampler-0.0", 0, "sampler 0")
    endpoint = link.endpoint if supervisor != "was never there" else f"ipc://{base}/nowhere"
    try:
        worker = start("answer_nobody", endpoint, 2000)  # 20 MB: more than a socket takes unread
        assert worker.stdout.readline() == "queued\n"
        if supervisor == "has closed its end":
            link.close()
        assert float(ask(worker)) < GONE_SECONDS
        assert worker.wait(SECONDS) == 0
    finally:
        link.close()
        context.term()


def test_hr56_messages_that_no_worker_takes_keep_no_supervisor_from_its_end(base):
    began = time.monotonic()
    context = zmq.Context()
    link = SupervisorLink(context, f"ipc://{base}/sampler-0.0", 0, "sampler 0")
    worker = context.socket(zmq.DEALER)  # it is there, and reads nothing
    worker.connect(link.endpoint)
    worker.linger = 0
    for _ in range(2000):
        link.send(Failed(why="x" * 10_000, is_final=False))
    link.close()
    worker.close()
    context.term()
    assert time.monotonic() - began < GONE_SECONDS
    assert os.listdir(base) == []
