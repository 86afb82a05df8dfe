"""What all tests share: GPU tests are skipped without a GPU, and process tests must leave nothing behind."""

import gc
import os
import signal
import time
import uuid

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.kept_processes import KEPT, SIGNALS
from tests.shared_files import shared_memory_files
from workers.machine.devices import count_gpus, torch_has_cuda

# Test processes share the cores: more threads each would wait for one another. Workers set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What the tests were started deaf to, by nohup or behind `&` in a script, the runs that they start are to hear.
for number in SIGNALS:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
HANDLERS = {number: signal.getsignal(number) for number in SIGNALS}

# A busy machine draws examples slowly; that decides nothing. pytest-timeout bounds each test.
settings.register_profile("headway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headway")

# Modules and tests, half a million objects, stay to the end: to walk them again and again while they come to be took a
# fifth of the time of collecting the tests.
gc.disable()

MARK = "HEADWAY_TEST"  # environment variable that every process started in a test inherits
PATIENCE_SECONDS = 5.0  # within which processes must be gone after their supervisor


def pytest_collection_modifyitems(items):
    if count_gpus() and torch_has_cuda():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU, or torch is built for the CPU only"))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    # A run unfreezes everything at its end, and the next one, which first collects what was left, would walk it all:
    # half a second of the processor for each of the session's hundreds of runs.
    gc.unfreeze = lambda: None


def pytest_runtest_teardown():
    """A command that has ended in this process has made it deaf for good, as what a later test starts would be."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def kept():
    """Processes for all the Supervisors and commands of the session that need none of their own."""
    yield KEPT
    pids = KEPT.pids
    KEPT.end()
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    assert not left, f"processes that were asked to end still run: {left}"


@pytest.fixture(autouse=True, scope="module")
def no_leftovers(request):
    """In tests/process and tests/e2e: no process of a test module and no file in /dev/shm outlives it, but for the
    processes that are kept for the next one.

    By module, not by test: tests that can share their processes do.
    """
    if not {"process", "e2e"} & set(request.path.parts):
        yield
        return
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    blocks = shared_memory_files()
    yield
    KEPT.forget()
    del os.environ[MARK]
    left = leftovers(mark, blocks)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = leftovers(mark, blocks)
    assert not left, f"left behind by the test: {left}"


def leftovers(mark, blocks):
    """Processes of this user that descend from one started under `mark`, whatever they are by now, and names in
    /dev/shm that are not among `blocks`.
    """
    found = sorted(shared_memory_files() - blocks)
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE or process.pid in KEPT.pids:
            continue
        try:
            if process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {' '.join(process.info['cmdline'] or [])}")
        except psutil.Error:  # it ended while we looked, or is another user's
            continue
    return found
