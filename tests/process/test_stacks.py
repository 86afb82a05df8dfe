"""Python stacks of a process that can't run any Python: by a signal, into memory of whoever asks."""

import os
import re
import signal
import time

import pytest

from workers.processes import stacks
from workers.processes.process import ROOT, WorkerProcess
from workers.processes.process_stat import catches
from workers.processes.stacks import SIGNAL, StackMemory

SECONDS = 30.0

STUCK = """
import os, re

def never_lets_go():
    re.match(r"(a|a)*$", "a" * 60 + "b")

def at_start():
    open({ready!r}, "w").close()
    never_lets_go()

at_start()
"""


@pytest.fixture
def stuck(tmp_path):
    """A worker whose module holds the interpreter's lock in one call that does not end."""
    ready = tmp_path / "ready"
    (tmp_path / "stuck_module.py").write_text(STUCK.format(ready=str(ready)))
    process = WorkerProcess(
        "stuck_module",
        f"ipc://{tmp_path}/socket",
        0,
        str(tmp_path / "log"),
        {"PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)])},
    )
    try:
        wait_until(ready.exists)
        yield process
    finally:
        process.close()


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_holds_the_interpreter_tells_where(stuck):
    for _ in range(2):  # the second answer takes the place of the first
        assert stuck.stacks.ask(stuck.pid)
        wait_until(stuck.stacks.is_whole)
        lines = stuck.stacks.read()
        assert re.match(r"(Current t|T)hread 0x", lines[0])
        found = [match[1] for line in lines if (match := re.search(r" in (\w+)$", line))]
        assert found.index("never_lets_go") < found.index("at_start") < found.index("main")
        assert found.count("never_lets_go") == 1
    assert stuck.alive


def test_a_stopped_process_tells_nothing_and_is_none_the_worse_for_it(stuck):
    os.kill(stuck.pid, signal.SIGSTOP)
    assert stuck.stacks.ask(stuck.pid)
    wait_until(stuck.stacks.is_whole)
    assert stuck.stacks.read() == []
    os.kill(stuck.pid, signal.SIGCONT)
    wait_until(lambda: any("never_lets_go" in line for line in stuck.stacks.read()))


def test_nobody_is_asked_who_would_die_of_it_and_this_process_tells_of_itself():
    memory = StackMemory()
    try:
        assert not catches(os.getpid(), SIGNAL) and not memory.ask(os.getpid())
        memory.write_own()
        assert any("in test_nobody_is_asked" in line for line in memory.read())
    finally:
        memory.close()
        memory.close()


def test_one_that_ends_as_it_is_asked_tells_nothing(monkeypatch):
    """It had a handler a moment ago."""
    monkeypatch.setattr(stacks, "catches", lambda pid, number: True)
    memory = StackMemory()
    try:
        assert not memory.ask(2**22 + 1)  # no process can have this number
    finally:
        memory.close()
