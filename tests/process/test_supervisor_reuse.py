"""One Supervisor, run after run: whatever the run before has left, the next one starts whole."""

import asyncio
import contextlib
import os
import signal
import threading

import pytest
from process_envs import MasksAll
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.processes.worker.run_workers import MODULES
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.tasks import guess
from workers.messages import Hello

ROWS = guess.train_rows(0)
SECONDS = 60.0  # bound on every wait


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def test_processes_that_died_between_two_runs_are_started_anew(model, tmp_path):
    """All of them, one after the other, in one supervisor."""
    rl.run(make_trainer(model, tmp_path / "before"), ROWS, steps=1)
    for role in ("environment", "sampler", "learner"):
        handle = model._pool._handles[(role, 0)]
        dead = handle.pid
        os.kill(dead, signal.SIGKILL)
        steps = rl.run(make_trainer(model, tmp_path / role), ROWS, steps=1)
        assert len(steps) == 1 and handle.pid != dead
        assert audit(tmp_path / role) == 0


def test_a_run_leaves_no_descriptor_to_the_next(model, tmp_path):
    """Nor to the one after that: what a run has left is garbage, of which none is to be there for good."""

    def num_ledgers(step):
        found.append(sum("headway-ledger" in os.readlink(link) for link in links() if os.path.lexists(link)))

    def links():
        return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]

    found = []
    for run in range(3):
        rl.run(make_trainer(model, tmp_path / str(run)), ROWS, steps=1, on_step=num_ledgers)
    assert found[0] == found[1] == found[2] > 0


def test_run_that_was_cancelled_in_its_start_does_not_reach_into_the_next(model, tmp_path, monkeypatch):
    """A new learner is halted before it can read the first run's start message. Then the next run starts, with another
    number of slots, and the learner wakes: that run is not to meet the first one's memory or answers.
    """
    receive, halted = WorkerHandle._receive, []
    model._pool.handle("learner", 0, MODULES["learner"], 1).discard()

    def halt_at_hello(handle, message):
        if isinstance(message, Hello) and handle.role == "learner" and not halted:
            os.kill(handle.pid, signal.SIGSTOP)
            halted.append(handle.pid)
        receive(handle, message)

    monkeypatch.setattr(WorkerHandle, "_receive", halt_at_hello)

    async def cancel_in_start():
        trainer = make_trainer(model, tmp_path / "cancelled", max_staleness=0)
        running = asyncio.ensure_future(anext(trainer.run(ROWS, steps=5)))
        while not halted and not running.done():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    def wake():
        with contextlib.suppress(ProcessLookupError):  # it was replaced
            os.kill(halted[0], signal.SIGCONT)

    async def train():
        trainer = make_trainer(model, tmp_path / "next", max_staleness=2)
        asyncio.get_running_loop().call_later(0.2, wake)
        return [step.n async for step in trainer.run(ROWS, steps=3)]

    asyncio.run(asyncio.wait_for(cancel_in_start(), SECONDS))
    assert asyncio.run(asyncio.wait_for(train(), SECONDS)) == [1, 2, 3]
    assert audit(tmp_path / "next") == 0


def test_a_successor_that_comes_up_when_its_run_is_over_does_not_reach_into_the_next(model, tmp_path, monkeypatch):
    """A sampler is killed, and its successor is halted as it begins to read the start message. Then the run ends."""
    receive, halted = WorkerHandle._receive, []
    handle = model._pool.handle("sampler", 0, MODULES["sampler"], 1)

    def halt_at_hello(of, message):
        receive(of, message)
        if isinstance(message, Hello) and of is handle:
            os.kill(of.pid, signal.SIGSTOP)
            halted.append(of.pid)

    async def leave_after_a_death():
        steps = make_trainer(model, tmp_path / "left").run(ROWS, steps=20)
        await anext(steps)
        monkeypatch.setattr(WorkerHandle, "_receive", halt_at_hello)
        os.kill(handle.pid, signal.SIGKILL)
        while not halted:
            await asyncio.sleep(0.01)
        await steps.aclose()

    asyncio.run(asyncio.wait_for(leave_after_a_death(), SECONDS))
    monkeypatch.undo()
    assert not handle.started
    assert len(rl.run(make_trainer(model, tmp_path / "next"), ROWS, steps=2)) == 2
    assert audit(tmp_path / "next") == 0


def test_two_runs_at_once_on_one_supervisor_are_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.supervisor.EARLIER_RUN_SECONDS", 0.5)

    async def both():
        first = make_trainer(model, tmp_path / "first").run(ROWS, steps=100)
        await anext(first)
        with pytest.raises(rl.RunError, match="in a run already"):
            await anext(make_trainer(model, tmp_path / "second").run(ROWS, steps=1))
        second = await anext(first)
        await first.aclose()
        return second.n

    assert asyncio.run(both()) == 2


def test_run_in_a_side_thread_is_refused(model, tmp_path):
    """Its processes would die with the thread."""
    errors = []

    def train():
        try:
            rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=1)
        except rl.RunError as error:
            errors.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "run in the main thread" in errors[0]


def test_error_of_the_users_own_code_ends_the_run_and_the_next_one_is_whole(model, tmp_path):
    def refuse(trajectories, metrics):
        assert len(trajectories) == 16 and metrics["train/generated_tokens"] > 0
        raise ValueError("not this batch")

    with pytest.raises(ValueError, match="not this batch"):
        rl.run(make_trainer(model, tmp_path / "refused", validate_batch=refuse), ROWS, steps=3)
    (end,) = events_of(tmp_path / "refused", "end")
    assert (end["status"], end["steps"]) == ("failed", 0) and audit(tmp_path / "refused") == 0
    assert len(rl.run(make_trainer(model, tmp_path / "next"), ROWS, steps=2)) == 2
    assert audit(tmp_path / "next") == 0


def test_a_batch_of_which_every_token_is_masked_ends_the_run(model, tmp_path):
    with pytest.raises(rl.RunError, match=r"loss_mask_end masks all \d+ sampled tokens of a batch"):
        rl.run(make_trainer(model, tmp_path / "masked", MasksAll), ROWS, steps=3)
    (end,) = events_of(tmp_path / "masked", "end")
    assert (end["status"], end["steps"]) == ("failed", 0) and audit(tmp_path / "masked") == 0


def test_run_may_begin_as_soon_as_the_caller_has_left_the_loop_of_another(model, tmp_path):
    """`break` leaves the generator to asyncio, which closes it a little later."""

    async def train():
        async for _ in make_trainer(model, tmp_path / "left").run(ROWS, steps=20):
            break
        return [step.n async for step in make_trainer(model, tmp_path / "next").run(ROWS, steps=2)]

    assert asyncio.run(train()) == [1, 2]
    assert audit(tmp_path / "left") == audit(tmp_path / "next") == 0


def test_run_whose_loop_was_left_in_a_loop_that_closed_leaves_the_supervisor_free(model, tmp_path):
    """asyncio.run cancels the generator's end when the coroutine that left it has returned."""

    async def leave(trainer):
        async for _ in trainer.run(ROWS, steps=20):
            break

    left = make_trainer(model, tmp_path / "left")
    asyncio.run(leave(left))
    assert len(rl.run(make_trainer(model, tmp_path / "next"), ROWS, steps=2)) == 2
    assert audit(tmp_path / "left") == audit(tmp_path / "next") == 0
