"""Who is told of, how often, and who is killed: the watch over processes that are not there."""

import pytest

from pipeline.processes.worker.worker_watch import WorkerWatch
from shm.errors import LedgerError
from shm.ledger import Activity, Ledger, LedgerShape
from workers.processes.process_stat import ProcessStat

NAMES = ("learner", "sampler-0", "environment-0")


class Handle:
    """In the place of a WorkerHandle."""

    def __init__(self, role, pid):
        self.role, self.index, self.pid = role, 0, pid
        self.name = f"{role} 0"
        self.incarnation = 0
        self.started = self.ready = True
        self.is_starting = False
        self.killed_for = []
        self.num_looks = 0

    def kill(self, why):
        self.killed_for.append(why)

    def notice_end(self):
        self.num_looks += 1


class Machine:
    """Three processes, the watch over them, and a clock."""

    failure = None

    def __init__(self, monkeypatch, timeout=10.0):
        shape = LedgerShape(num_slots=0, num_reservations=0, num_workers=3)
        ledger = Ledger(memoryview(bytearray(shape.num_bytes)), shape)
        ledger.format(run_id=1)
        self.rows = {name: ledger.worker(index) for index, name in enumerate(NAMES)}
        self.all = [Handle(name.partition("-")[0], 100 + index) for index, name in enumerate(NAMES)]
        self.by_name = dict(zip(NAMES, self.all, strict=True))
        self.stats = {handle.pid: ProcessStat("S", 0) for handle in self.all}
        self.told, self.now, self.code, self.silent = [], 0.0, None, set()
        for handle in self.all:
            self.introduce(handle)
        monkeypatch.setattr("pipeline.processes.worker.worker_watch.read_stat", lambda pid: self.stats[pid])
        monkeypatch.setattr("pipeline.processes.worker.worker_watch.bytes_moved", lambda pid: 0)
        self.watch = WorkerWatch(
            self,
            self.rows,
            timeout,
            lambda handle: self.code if handle.role == "environment" else None,
            tell=self.told.append,
            clock=lambda: self.now,
        )

    def introduce(self, handle):
        self.rows[NAMES[self.all.index(handle)]].introduce(handle.pid, handle.incarnation)

    def pass_time(self, seconds):
        """Look once a second; those who are not silent beat."""
        for _ in range(seconds):
            for name, row in self.rows.items():
                if name not in self.silent:
                    row.beat(Activity.BUSY)
            self.now += 1.0
            self.watch.look()

    def stop(self, name):
        self.silent.add(name)
        self.stats[self.by_name[name].pid] = ProcessStat("T", 0)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_nobody_is_told_of_while_all_beat(machine):
    machine.pass_time(60)
    assert machine.told == [] and machine.watch.standing_still == ""


def test_a_stopped_worker_is_told_of_within_seconds_once_and_killed_after_the_time_out(machine):
    machine.pass_time(3)
    machine.stop("sampler-0")
    machine.pass_time(2)
    sentence = "sampler 0 (pid 101) has been stopped for 2 s (SIGSTOP, or a debugger); it is killed and replaced after "
    assert machine.watch.standing_still == f"the {sentence}worker_timeout = 10 s"
    assert [name for name in NAMES if machine.watch.stands_still(machine.by_name[name])] == ["sampler-0"]
    machine.pass_time(7)
    assert len(machine.told) == 1 and machine.told[0].startswith(
        "The sampler 0 (pid 101) has been stopped for 1 s (SIG"
    )
    assert machine.by_name["sampler-0"].killed_for == []
    machine.pass_time(1)
    assert machine.by_name["sampler-0"].killed_for == [
        "has been stopped for 10 s (SIGSTOP, or a debugger), and worker_timeout is 10 s"
    ]
    assert all(not machine.by_name[name].killed_for for name in ("learner", "environment-0"))


def test_a_place_that_stays_empty_is_told_of_once_and_of_a_run_that_has_failed_no_more(machine):
    sampler = machine.by_name["sampler-0"]
    machine.pass_time(3)
    sampler.started = False
    machine.pass_time(2)
    assert machine.told == [] and machine.watch.standing_still == ""
    machine.pass_time(60)
    assert machine.told == ["The sampler 0 has ended, and has had no successor for 3 s."]
    assert machine.watch.standing_still == "the sampler 0 has ended, and has had no successor for 62 s"
    sampler.started, sampler.incarnation = True, 1
    machine.introduce(sampler)
    machine.pass_time(5)
    assert machine.watch.standing_still == "" and len(machine.told) == 1
    assert sampler.num_looks == 70, "also for an end that nobody has noticed"
    sampler.started, machine.failure = False, RuntimeError()
    machine.pass_time(60)
    assert machine.watch.standing_still == "" and len(machine.told) == 1


def test_how_long_a_process_has_been_stopped_is_told_of_nobody_who_is_only_silent_or_gone(machine):
    learner = machine.by_name["learner"]
    machine.pass_time(3)
    machine.silent.add("learner")
    machine.pass_time(4)
    assert machine.watch.stopped_seconds(learner) == 0.0
    machine.stop("learner")
    machine.pass_time(3)
    assert machine.watch.stopped_seconds(learner) >= 3.0
    assert machine.watch.stopped_seconds(machine.by_name["sampler-0"]) == 0.0
    learner.started = False
    assert machine.watch.stopped_seconds(learner) == 0.0


def test_a_worker_that_gets_on_again_is_told_of_too_and_given_longer_the_next_time(machine):
    def be_silent(seconds):
        machine.silent.add("learner")
        machine.pass_time(seconds)
        machine.silent.clear()
        machine.pass_time(1)

    machine.pass_time(1)
    be_silent(4)
    assert machine.told == [
        "The learner 0 (pid 100) has given no sign of life for 3 s; it is killed and replaced after worker_timeout = "
        "10 s.",
        "The learner 0 (pid 100) gets on again.",
    ]
    be_silent(5)  # a long optimizer step is not told of at each update
    assert len(machine.told) == 2
    be_silent(7)
    assert len(machine.told) == 4


def test_a_worker_that_was_let_go_gets_on_again_with_its_next_heartbeat(machine):
    machine.pass_time(1)
    machine.stop("learner")
    machine.pass_time(1)
    machine.stats[100] = ProcessStat("D", 0)  # its memory has to come from a disk
    machine.pass_time(1)
    assert len(machine.told) == 1 and machine.watch.standing_still == ""
    machine.silent.clear()
    machine.pass_time(1)
    assert machine.told[1:] == ["The learner 0 (pid 100) gets on again."]


def test_users_code_that_holds_its_process_is_told_of_once_and_not_killed_here(machine):
    machine.pass_time(1)
    machine.code = "reward of trajectory 3.1"
    machine.silent.add("environment-0")
    machine.pass_time(60)
    assert machine.told == [
        "The environment 0 (pid 102) has been at reward of trajectory 3.1 for 3 s and runs nothing else meanwhile."
    ]
    assert "has been at reward of trajectory 3.1 for 60 s" in machine.watch.standing_still
    machine.silent.clear()
    machine.pass_time(1)
    machine.code = "reward of trajectory 4.0"
    machine.silent.add("environment-0")
    machine.pass_time(5)
    assert len(machine.told) == 1 and machine.by_name["environment-0"].killed_for == []


def test_a_stopped_environment_process_is_killed_whoever_is_in_users_code_there(machine):
    machine.code = "reward of trajectory 3.1"
    machine.pass_time(1)
    machine.stop("environment-0")
    machine.pass_time(12)
    assert machine.by_name["environment-0"].killed_for


def test_a_successor_and_a_process_that_starts_begin_anew(machine):
    machine.pass_time(1)
    machine.stop("sampler-0")
    machine.pass_time(8)
    handle = machine.by_name["sampler-0"]
    handle.started = False
    machine.pass_time(2)
    assert machine.watch.standing_still == ""
    handle.pid, handle.incarnation, handle.started, handle.is_starting, handle.ready = 201, 1, True, True, False
    for ticks in range(20):  # its heartbeat is the one before's still; it imports
        machine.stats[201] = ProcessStat("R", ticks)
        machine.pass_time(1)
    assert machine.watch.standing_still == "" and handle.killed_for == []
    assert len(machine.told) == 1  # of the one before; this one does not "get on again"
    machine.pass_time(10)  # a deadlock on its way to Ready
    assert len(handle.killed_for) == 1


def test_a_worker_halted_in_the_middle_of_its_introduction_is_watched(machine, monkeypatch):
    class Torn:
        def read(self):
            raise LedgerError("torn")

    handle = machine.by_name["sampler-0"]
    handle.is_starting, handle.ready = True, False
    machine.stop("sampler-0")
    next(one for one in machine.watch._watched if one.handle is handle).row = Torn()
    machine.pass_time(12)
    assert handle.killed_for


def test_an_idle_worker_that_waits_for_its_start_is_not_told_of(machine):
    handle = machine.by_name["sampler-0"]
    handle.ready = False  # the learner still loads
    machine.silent.add("sampler-0")
    machine.pass_time(60)
    assert machine.told == [] and handle.killed_for == []
