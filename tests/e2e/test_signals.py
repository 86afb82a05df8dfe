"""SIGINT, SIGTERM and SIGHUP in every phase of a run: one ends it in order and saved, two end it at once.

The signals are real, and come when the run is in the phase: whoever it waits for then is held, so no phase is missed.
How a process of its own is ended with all its workers is proved by test_run_py.py.
"""

import os
import signal
import threading
import time

import psutil
import pytest

from pipeline import audit
from pipeline.checkpoints.saved import checkpoint_version
from pipeline.commands import launch
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.worker.worker_handle import WorkerHandle
from tests.e2e.run_py import PATIENCE_SECONDS, SMALL, RunFiles
from tests.kept_processes import KEPT

GONE_SECONDS = 10.0  # from the signal, or from when what is waited for moves again, to the end of the command
ALWAYS_UPDATES = ("--entropy-coefficient", "0.01")  # equal rewards have a gradient, too
HELD = ("--tool-latency", "fixed:600000")  # nothing is finished while the test runs

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Run(RunFiles):
    """`headway run` in this process. Beside it, a thread that acts when the run waits for something."""

    def __init__(self, run_dir, patch):
        super().__init__(run_dir)
        self.trainer = None
        self.hold_after = None  # the step behind which the learner answers no more
        self.hold_successor = None  # the role of processes that get nowhere once they are started
        self.hold_save = None  # the version that it gets no further than to be asked to save
        self.held_learner = -1  # its process id
        self.signalled = 0.0  # when the last thing was done to it
        self.errors = []
        self.out = ""
        self.made, self.held, self.replaced = threading.Event(), threading.Event(), threading.Event()
        make_trainer, show, save_weights = launch.make_trainer, launch.Progress.show, ActiveRun.save_weights
        spawn = WorkerHandle.spawn

        def make_and_keep(*arguments):
            self.trainer = make_trainer(*arguments)
            self.made.set()
            return self.trainer

        def show_and_hold(progress, n, metrics):
            if n == self.hold_after:
                self._hold_learner()
            show(progress, n, metrics)

        async def hold_and_save(active, version, *arguments):
            if version == self.hold_save:
                self._hold_learner()
            return await save_weights(active, version, *arguments)

        def spawn_and_hold(handle, *arguments):
            spawn(handle, *arguments)
            if handle.role == self.hold_successor:
                os.kill(handle.pid, signal.SIGSTOP)
                self.replaced.set()

        patch.setattr(WorkerHandle, "spawn", spawn_and_hold)
        patch.setattr(ActiveRun, "save_weights", hold_and_save)
        patch.setattr(launch, "make_trainer", make_and_keep)
        patch.setattr(launch.Progress, "show", show_and_hold)

    @property
    def learner(self):
        (pid,) = (handle.pid for handle in KEPT.handles if handle.role == "learner" and handle.started)
        return pid

    def train(self, *options, act, **held):
        """The exit code and stderr of a run beside which `act(self)` is called, in a thread of its own."""
        for name, value in held.items():
            setattr(self, name, value)
        thread = threading.Thread(target=self._act, args=[act])
        thread.start()
        command = ["run", *SMALL, "--device", "cpu", "--run-dir", str(self.run_dir), *ALWAYS_UPDATES, *options]
        code, self.out, err = KEPT.command(self.run_dir.parent, *command)
        took = time.monotonic() - self.signalled
        thread.join()
        assert not self.errors, self.errors
        assert took < GONE_SECONDS
        return code, err

    def _act(self, act):
        try:
            assert self.made.wait(PATIENCE_SECONDS)
            act(self)
        except BaseException as error:  # the parent's test must fail, and the run end
            self.errors.append(error)
            self.send_twice(signal.SIGTERM)

    def wait_for(self, words):
        """Until this is whom the run waits for."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.trainer.waits_for.startswith(words):
            assert time.monotonic() < deadline, f"no wait for {words} within {PATIENCE_SECONDS:g} s"
            time.sleep(0.01)
        if self.hold_after is not None or self.hold_save is not None:
            assert self.held.wait(PATIENCE_SECONDS)

    def send(self, number):
        os.kill(os.getpid(), number)
        self.signalled = time.monotonic()

    def send_twice(self, number):
        self.send(number)
        time.sleep(0.2)  # two signals that meet are one
        self.send(number)

    def _hold_learner(self):
        self.held_learner = self.learner
        os.kill(self.held_learner, signal.SIGSTOP)
        self.held.set()

    def release_learner(self):
        os.kill(self.learner, signal.SIGCONT)
        self.signalled = time.monotonic()


@pytest.fixture
def run(kept, tmp_path, monkeypatch):
    before = {number: signal.signal(number, lambda *_: None) for number in CODES}  # a late one must not end the tests
    yield Run(tmp_path / "run", monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


def check_end(run, status):
    """The log's last word, its audit, and that nothing half-written is left. The versions that were saved."""
    (end,) = run.events("end")
    assert end["status"] == status
    assert audit.main(str(run.run_dir / "events.jsonl")) == 0
    saved = [checkpoint_version(path) for path in (run.run_dir / "checkpoints").glob("*")]
    assert sorted(saved) == sorted(event["version"] for event in run.events("checkpoint"))
    assert list((run.run_dir / "checkpoints").glob(".*")) == []
    return end, saved


def version_of(run):
    return max((event["version"] for event in run.events("published")), default=0)


@pytest.mark.parametrize("number", CODES)
def test_in_an_evaluation_and_a_wait_for_rollouts_nothing_is_waited_for(run, number):
    """HR64. Neither the first evaluation nor the first batch would end within the test."""

    def act(run):
        run.wait_for("too few finished groups")
        run.send(number)

    options = ("--steps", "2", "--eval-every", "1", *HELD)
    assert run.train(*options, act=act) == (CODES[number], "")
    assert 0 in check_end(run, "stopped")[1]
    assert [event["status"] for event in run.events("evaluation")] == ["stopped"]


def test_an_update_that_has_begun_is_finished_counted_and_saved(run):
    def act(run):
        run.wait_for("the learner, which trains batch 2")
        run.send(signal.SIGTERM)
        time.sleep(0.2)  # were it to end the run without the update, that would show
        run.release_learner()

    assert run.train("--steps", "100000", act=act, hold_after=1) == (143, "")
    end, saved = check_end(run, "stopped")
    last = run.events("batch")[-1]
    assert end["steps"] == len(run.lines("metrics.jsonl")) == last["step"] == 2
    assert run.events("optim")[-1]["step"] == last["step"]
    assert version_of(run) in saved


@pytest.mark.parametrize(
    ("steps", "version", "options", "status"),
    [(100000, 1, ("--weights-every", "1"), "stopped"), (2, 2, (), "completed")],
)
def test_a_checkpoint_that_is_being_written_is_finished(run, steps, version, options, status):
    """HR64. In mid-run, and at its end: there it shows in the exit code alone that someone asked for it."""

    def act(run):
        run.wait_for(f"the learner, which saves version {version}")
        run.send(signal.SIGINT)
        run.release_learner()

    assert run.train("--steps", str(steps), *options, act=act, hold_save=version) == (130, "")
    end, saved = check_end(run, status)
    assert end["steps"] == version and max(saved) == version_of(run) == version


@pytest.mark.parametrize(
    ("words", "steps", "held"),
    [
        ("the learner, which trains batch 2", 100000, {"hold_after": 1}),
        ("the learner, which saves version 1", 1, {"hold_save": 1}),
    ],
)
def test_the_second_signal_ends_the_run_at_once_whatever_it_waits_for(run, words, steps, held):
    """The learner, which is held, would not let it end. What was saved before stays good."""

    def act(run):
        run.wait_for(words)
        run.send_twice(signal.SIGTERM)

    assert run.train("--steps", str(steps), act=act, **held) == (143, "")
    assert check_end(run, "stopped")[1] == [0]
    assert not psutil.pid_exists(run.held_learner)


def pids(role):
    """Of the first process of that role, if it is there: others may be kept of runs that had more."""
    return [handle.pid for handle in KEPT.handles if (handle.role, handle.index) == (role, 0) and handle.started]


@pytest.mark.parametrize(
    ("role", "words", "held"),
    [
        ("learner", "the learner, which died and is brought back to version 1", {"hold_after": 1}),
        ("sampler", "too few finished groups", {}),
        ("environment", "too few finished groups", {}),
    ],
)
def test_a_process_that_is_being_replaced_is_not_waited_for(run, role, words, held):
    """Its successor is held: the run could wait for it for long. What the learner was to train is in the journal."""

    def act(run):
        run.wait_for("the learner, which trains batch 2" if held else "too few finished groups")
        run.hold_successor = role
        (pid,) = pids(role)
        os.kill(pid, signal.SIGKILL)
        assert run.replaced.wait(PATIENCE_SECONDS)
        run.wait_for(words)
        run.send(signal.SIGTERM)

    options = ("--steps", "2") if held else ("--steps", "2", *HELD)
    code, err = run.train(*options, act=act, **held)
    assert code == 143 and err.count("\n") == 1 and "Another process" in err
    assert check_end(run, "stopped")[1] == [0]
    assert not pids(role)
    assert ("the learner was gone when the run was to end" in run.out) == bool(held)
    if held:
        run.hold_successor = None
        code, _, err = KEPT.command(run.run_dir.parent, "run", "--resume", str(run.run_dir))
        assert (code, err) == (0, "") and version_of(run) == 2
        assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2]
        assert audit.main(str(run.run_dir / "events.jsonl")) == 0


def test_a_learner_that_stays_stopped_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr("pipeline.processes.active_run.STOPPED_SECONDS", 1.0)

    def act(run):
        run.wait_for("the learner, which trains batch 2")
        run.send(signal.SIGTERM)

    assert run.train("--steps", "100000", act=act, hold_after=1)[0] == 143
    assert check_end(run, "stopped")[1] == [0] and "the learner was gone" in run.out
    assert len(run.lines("metrics.jsonl")) == 1
