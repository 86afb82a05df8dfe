"""Time accounts add up to the wall clock, and memory is that of the process asked for."""

import os
from array import array

import pytest

from pipeline.processes.process_metrics import TimeAccount, WorkerTimes, memory_metrics
from shm.errors import LedgerError
from shm.ledger import Activity, Ledger, LedgerShape

SHAPE = LedgerShape(num_slots=1, num_reservations=1, num_workers=2)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_trainer_time_is_divided_between_its_states_without_a_gap():
    clock = Clock()
    account = TimeAccount(clock)
    for state, seconds in (("busy", 2.0), ("waiting", 0.5), ("busy", 1.0), ("idle", 4.0)):
        account.switch(state)
        clock.now += seconds
    assert account.take() == {
        "time/trainer_busy_seconds": 3.0,
        "time/trainer_waiting_seconds": 0.5,
        "time/trainer_idle_seconds": 4.0,
    }
    clock.now += 0.25
    assert account.take()["time/trainer_idle_seconds"] == 0.25  # the state goes on in the next interval


def test_switch_tells_the_state_before_so_that_it_can_be_restored():
    account = TimeAccount(Clock())
    account.switch("waiting")
    assert account.switch("busy") == "waiting"


@pytest.fixture
def ledger():
    ledger = Ledger(memoryview(array("q", [0] * (SHAPE.num_bytes // 8))).cast("B"), SHAPE)
    ledger.format(1)
    return ledger


def test_times_are_told_of_a_worker_that_was_killed_in_the_middle_of_its_introduction(ledger):
    now = [10**9]
    row = ledger.worker(1)
    row.introduce(5, 1)
    times = WorkerTimes({"sampler-0": row}, clock_ns=lambda: now[0])
    ledger._words[row._start] += 1  # its process id is that of the next one, the check word that of the one before
    with pytest.raises(LedgerError):
        row.read()
    assert set(times.take()) == {f"time/sampler-0_{state}_seconds" for state in ("busy", "waiting", "idle")}
    assert row.heartbeat_ns > 0


def test_worker_times_are_differences_between_steps_and_add_up(ledger, monkeypatch):
    now = [10**9]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    row = ledger.worker(1)
    row.introduce(5, 1)
    row.beat(Activity.IDLE)
    times = WorkerTimes({"sampler-0": ledger.worker(1)}, clock_ns=lambda: now[0])
    now[0] += 10**9
    row.beat(Activity.BUSY)
    now[0] += 2 * 10**9
    assert times.take() == {
        "time/sampler-0_busy_seconds": 2.0,
        "time/sampler-0_waiting_seconds": 0.0,
        "time/sampler-0_idle_seconds": 1.0,
    }
    now[0] += 3 * 10**9
    row.beat(Activity.WAITING)
    now[0] += 10**9
    assert times.take() == {
        "time/sampler-0_busy_seconds": 3.0,
        "time/sampler-0_waiting_seconds": 1.0,
        "time/sampler-0_idle_seconds": 0.0,
    }


def test_memory_is_resident_bytes_and_a_dead_process_is_left_out():
    metrics = memory_metrics({"supervisor": os.getpid(), "gone": 2**22 + 1})
    assert metrics.keys() == {"memory/supervisor_bytes"}
    with open(f"/proc/{os.getpid()}/status") as status:
        resident = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    assert metrics["memory/supervisor_bytes"] == pytest.approx(resident, rel=0.1)
