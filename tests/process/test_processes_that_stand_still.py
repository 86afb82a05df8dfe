"""Processes that are stopped or spin in a run: named within seconds, killed and replaced only after worker_timeout."""

import asyncio
import os
import signal
import time

import pytest
from running import audit, events_of, make_trainer, steps_taken

import pipeline as rl
from pipeline.tasks import guess
from workers.errors import WorkerDied

ROWS = guess.train_rows(0)
SECONDS = 60.0  # bound on every run
NAMED_WITHIN = 5.0


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    """Most of the time of these tests would be the second from one look to the next."""
    monkeypatch.setattr("pipeline.processes.active_run.WATCH_SECONDS", 0.2)


def run_with(model, run_dir, act, steps=4, **options):
    trainer = make_trainer(model, run_dir, **options)
    return steps_taken(trainer, ROWS, steps, lambda step: act(step, trainer), seconds=SECONDS)


async def named(model):
    """Until somebody stands still; how many seconds that took, and the words."""
    began = time.monotonic()
    while not (words := model._run.standing_still):
        await asyncio.sleep(0.02)
    return time.monotonic() - began, words


@pytest.mark.parametrize("role", ["sampler", "environment", "learner"])
def test_a_process_that_is_stopped_is_named_and_goes_on_when_it_is_let(model, tmp_path, role):
    found = []

    async def act(step, trainer):
        if step.n == 2:
            pid = next(handle.pid for handle in model._run.workers.all if handle.role == role)
            os.kill(pid, signal.SIGSTOP)
            found.extend(await named(model))
            os.kill(pid, signal.SIGCONT)
            while model._run.standing_still:
                await asyncio.sleep(0.02)

    with pytest.warns(rl.RunWarning) as warned:
        assert run_with(model, tmp_path / "run", act) == [1, 2, 3, 4]
    seconds, words = found
    assert seconds < NAMED_WITHIN
    assert words.startswith(f"the {role} 0 (pid ") and "has been stopped for 1 s (SIGSTOP, or a debugger)" in words
    sooner = ", or when a call there has used up environment_timeout" if role == "environment" else ""
    assert words.endswith(f"it is killed and replaced after worker_timeout = 60 s{sooner}")
    assert [str(one.message).rpartition(") ")[2] for one in warned][1:] == ["gets on again."]
    assert events_of(tmp_path / "run", "restart") == []
    assert audit(tmp_path / "run") == 0


@pytest.mark.parametrize("role", ["sampler", "environment", "learner"])
@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.RunWarning")
def test_a_process_that_stays_stopped_is_killed_and_replaced_and_the_wait_tells_of_it(
    model, tmp_path, monkeypatch, role
):
    monkeypatch.setattr(model, "worker_timeout", 2.5)

    async def act(step, trainer):
        if step.n == 1:
            os.kill(next(handle.pid for handle in model._run.workers.all if handle.role == role), signal.SIGSTOP)

    assert run_with(model, tmp_path / "run", act) == [1, 2, 3, 4]
    (restart,) = events_of(tmp_path / "run", "restart")
    assert restart["worker"] == f"{role} 0"
    assert (
        "was killed: it has been stopped for 3 s (SIGSTOP, or a debugger), and worker_timeout is 2.5 s"
        in (restart["cause"])
    )
    waits = [event["detail"] for event in events_of(tmp_path / "run", "wait")]
    # A batch with the learner is no wait of the log; what the run says it waits for has it (TrainingLoop.waits_for).
    assert role == "learner" or any(
        f"; the {role} 0 (pid " in detail and "has been stopped for" in detail for detail in waits
    )
    assert audit(tmp_path / "run") == 0


@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.RunWarning")
def test_a_learner_that_spins_is_killed_for_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "worker_timeout", 3.5)
    monkeypatch.setattr(model, "max_restarts", 0)
    loss = rl.CustomLoss(path="user_losses:spin", normalize="token")

    async def act(step, trainer):
        raise AssertionError("no batch can train")

    began = time.monotonic()
    with pytest.raises((WorkerDied, rl.RunError), match=r"has computed for \d s without a sign of life, and worker_t"):
        run_with(model, tmp_path / "run", act, loss=loss)
    assert time.monotonic() - began < 30.0


def test_processes_that_are_stopped_while_they_start_are_named_killed_and_replaced(tmp_path, monkeypatch):
    open_run, stopped = rl.Supervisor.open_run, {}

    async def stop(pool):
        while len(stopped) < 3:
            for handle in pool.handles:
                if handle.started and handle.role not in stopped:
                    os.kill(handle.pid, signal.SIGSTOP)
                    stopped[handle.role] = handle.pid
            await asyncio.sleep(0)

    async def stop_them_and_open(supervisor, *arguments, **options):
        stopping = asyncio.ensure_future(stop(supervisor._pool))
        try:
            return await open_run(supervisor, *arguments, **options)
        finally:
            await stopping

    monkeypatch.setattr(rl.Supervisor, "open_run", stop_them_and_open)
    with rl.Supervisor(device="cpu", worker_timeout=2.5) as starting, pytest.warns(rl.RunWarning) as warned:
        assert steps_taken(make_trainer(starting, tmp_path / "run"), ROWS, 1, seconds=SECONDS) == [1]
    restarts = events_of(tmp_path / "run", "restart")
    assert {event["worker"] for event in restarts} == {"learner 0", "sampler 0", "environment 0"}
    assert len(restarts) == 3
    told = [str(one.message) for one in warned]
    for role, pid in stopped.items():
        assert any(text.startswith(f"The {role} 0 (pid {pid}) has been stopped for 1 s (SIGSTOP") for text in told)
    assert all("has been stopped for" in event["cause"] for event in restarts)
