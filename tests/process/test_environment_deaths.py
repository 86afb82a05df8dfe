"""Environment processes that hang or die in the middle of a run: who pays for it, who starts again, what is left."""

import asyncio
import os
import signal
import threading

import psutil
import pytest
from running import audit, events_of, make_trainer, metrics_of, steps_taken, worker_processes

import pipeline as rl
from pipeline.tasks import guess

SECONDS = 120.0  # bound on every run


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor
    assert {process.pid for process in worker_processes(os.getpid())} == kept.pids


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr("pipeline.processes.environment.environment_watch.GRACE_SECONDS", 0.5)
    monkeypatch.setattr("pipeline.processes.active_run.WATCH_SECONDS", 0.25)


def rows_with(**fatal):
    """Rows of which the third is fatal; a run here comes to it once."""
    rows = [dict(row) for row in guess.train_rows(0)[:24]]
    rows[2] |= fatal
    return rows


def train(model, tmp_path, rows, steps=2, act=None, env="Fatal", max_retries=0, **options):
    """The numbers of the steps of a run; `act(step)` is awaited after each."""
    defaults = {"groups_per_step": 3, "group_size": 3, "max_staleness": 1, "timeout": 1.0, "on_failure": "replace"}
    sampling = {"environment_processes": 2, "max_retries": max_retries}
    trainer = make_trainer(
        model,
        tmp_path / "run",
        env=f"fatal_envs:{env}",
        arguments={"directory": str(tmp_path)},
        sampling=sampling,
        **(defaults | options),
    )
    return steps_taken(trainer, rows, steps, act, seconds=SECONDS)


@pytest.mark.parametrize(
    ("fatal", "why"),
    [
        ("spinning", "could not be cancelled"),
        ("sleeping thread", "did not end when it was cancelled"),
        ("backtracking thread", "could not be cancelled"),
    ],
)
def test_a_hang_fails_its_own_trajectory_and_nobody_elses(model, tmp_path, fatal, why):
    async def act(step):
        """A thread that goes on in vain is seen to only later."""
        while step.n == 2 and model._run.num_restarts == 0:
            await asyncio.sleep(0.01)

    assert train(model, tmp_path, rows_with(fatal=fatal, leaves="child"), act=act) == [1, 2]
    run_dir = tmp_path / "run"
    (failed,), (restart,) = events_of(run_dir, "failed"), events_of(run_dir, "restart")
    assert failed["group"] == 2 and "on_turn of trajectory 2.0" in failed["cause"]
    assert "took longer than environment_timeout = 1 s" in failed["cause"]
    assert why in restart["cause"] and "was killed: on_turn of " in restart["cause"]
    assert restart["worker"].startswith("environment")
    assert not is_alive(int((tmp_path / "child").read_text()))  # a process that the killed one had started
    assert audit(run_dir) == 0


@pytest.mark.parametrize("fatal", ["exit", "segfault"])
def test_a_death_costs_nobody_but_a_new_start(model, tmp_path, fatal):
    assert train(model, tmp_path, rows_with(fatal=fatal, once="done"), on_failure="stop") == [1, 2]
    run_dir = tmp_path / "run"
    retries = events_of(run_dir, "retry")
    assert len(events_of(run_dir, "restart")) == 1 and events_of(run_dir, "failed") == []
    assert retries and {event["attempt"] for event in retries} == {1}
    assert "2.0" in [event["trajectory"] for event in retries]
    assert audit(run_dir) == 0


@pytest.mark.parametrize(
    ("fatal", "end"),
    [
        ("exit", "ended with status 3"),
        ("halt", "was stopped .* for longer than environment_timeout allows"),
    ],
)
def test_who_brings_three_processes_down_fails(model, tmp_path, fatal, end):
    with pytest.raises(rl.RunError, match=rf"2\.0 was in user code, as its group had been at 2 deaths .* {end}"):
        train(model, tmp_path, rows_with(fatal=fatal), on_failure="stop")
    assert len(events_of(tmp_path / "run", "restart")) == 3
    assert audit(tmp_path / "run") == 0


def test_a_hang_that_passes_costs_its_trajectory_one_retry(model, tmp_path):
    """The others that were in the process start again, too, and of theirs none is counted."""
    rows = rows_with(fatal="spinning", once="done")
    assert train(model, tmp_path, rows, on_failure="stop", max_retries=1) == [1, 2]
    run_dir = tmp_path / "run"
    causes = {event["trajectory"]: event["cause"] for event in events_of(run_dir, "retry")}
    assert "on_turn of trajectory 2.0 took longer than environment_timeout = 1 s" in causes.pop("2.0")
    assert all("was killed: on_turn of trajectory 2.0" in cause for cause in causes.values())
    counted = {key: sum(line[f"recovery/{key}"] for line in metrics_of(run_dir)) for key in ("failures", "timeouts")}
    assert counted == {"failures": 1, "timeouts": 1}
    assert audit(run_dir) == 0


def test_processes_killed_at_any_moment(model, tmp_path):
    """Or their keepers, with which they go."""
    run_dir = tmp_path / "run"

    async def act(step):
        handles = model._run.workers.environments
        victim = handles[step.n % 2]
        if step.n <= 4 and victim.ready:
            pid = victim.pid if step.n <= 2 else psutil.Process(victim.pid).ppid()
            os.kill(pid, signal.SIGKILL)

    assert train(model, tmp_path, rows_with(), steps=6, act=act, on_failure="stop") == list(range(1, 7))
    assert 1 <= len(events_of(run_dir, "restart")) <= 4
    assert audit(run_dir) == 0


def test_trajectories_with_snapshots_go_on_elsewhere_with_their_tokens(model, tmp_path):
    run_dir = tmp_path / "run"

    async def act(step):
        victim = model._run.workers.environments[step.n % 2]
        if step.n <= 2 and victim.ready:
            os.kill(victim.pid, signal.SIGKILL)

    rows = rows_with(fatal="exit", once="done")
    assert train(model, tmp_path, rows, steps=4, act=act, env="Remembering", on_failure="stop") == [1, 2, 3, 4]
    assert len(events_of(run_dir, "restart")) >= 2
    assert sum(line["recovery/restored"] for line in metrics_of(run_dir)) > 0
    # Only one whose reset was under way starts again.
    assert {event["tokens"] for event in events_of(run_dir, "retry")} <= {0}
    assert audit(run_dir) == 0


def test_a_hang_in_a_thread_of_the_supervisor_ends_the_run(model, tmp_path, monkeypatch):
    """Where no other process can import the class, nothing can be killed."""
    monkeypatch.setattr("pipeline.environments.thread.CLOSE_SECONDS", 0.5)
    release = threading.Event()

    class Local(guess.Guess):
        def on_turn(self, traj):
            release.wait(SECONDS)

    trainer = make_trainer(model, tmp_path / "run", env=Local, timeout=0.5)
    try:
        with pytest.raises(
            rl.RunError, match=r"hangs: on_turn of trajectory \d\.\d took .* = 0.5 s, .* can't be ended"
        ):
            rl.run(trainer, rows_with(), steps=1)
    finally:
        release.set()
    assert audit(tmp_path / "run") == 0


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # whose parent is gone, and who waits for init
    except psutil.NoSuchProcess:
        return False
