"""Workers that die when nobody is waiting for them: they are replaced, or the run ends with their name."""

import asyncio
import os
import select
import signal

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.processes.worker.run_workers import MODULES
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.tasks import guess
from workers.errors import WorkerDied
from workers.messages import Ready

ROWS = guess.train_rows(0)
SECONDS = 100.0  # bound on a short run, on a machine with ten times as much to do


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


def train_and_kill(model, run_dir, monkeypatch, victim):
    """Three steps of a run whose `victim` dies after its own Ready, before the sampler's is delivered."""
    receive = WorkerHandle._receive

    def kill_before_the_samplers_ready(handle, message):
        if isinstance(message, Ready) and handle.role == "sampler":
            pid = model._pool._handles[(victim, 0)].pid
            pidfd = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([pidfd], [], [], SECONDS)
            os.close(pidfd)
        receive(handle, message)

    monkeypatch.setattr(WorkerHandle, "_receive", kill_before_the_samplers_ready)

    async def train():
        return [step.n async for step in make_trainer(model, run_dir).run(ROWS, steps=3)]

    return asyncio.run(asyncio.wait_for(train(), SECONDS))


@pytest.mark.parametrize("victim", ["learner", "environment"])
def test_process_that_dies_while_the_sampler_still_starts_is_replaced(model, tmp_path, monkeypatch, victim):
    assert train_and_kill(model, tmp_path / "run", monkeypatch, victim) == [1, 2, 3]
    assert [event["worker"] for event in events_of(tmp_path / "run", "restart")] == [f"{victim} 0"]
    assert audit(tmp_path / "run") == 0


def test_sampler_that_dies_before_it_is_ready_ends_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.processes.worker.run_blocks.RunBlocks.sampler_config", lambda *_: {"threads": "none"})
    model._pool.handle("sampler", 0, MODULES["sampler"], 1).discard()
    with pytest.raises(WorkerDied, match="The sampler 0 stopped: "):
        rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=1)
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["failed"]


def test_learner_that_dies_between_two_steps_is_back_for_the_next(model, tmp_path):
    """The caller takes its time, so that its end is known and two batches are ready when the next step begins."""

    async def train():
        trainer = make_trainer(model, tmp_path / "run")
        async for step in trainer.run(ROWS, steps=5):
            if step.n == 3:
                run = model._run
                while trainer._run._loop._rollouts.completed.qsize() < 8:  # all that are admitted
                    await asyncio.sleep(0.01)
                os.kill(run.workers.learner.pid, signal.SIGKILL)
                while run.num_restarts == 0:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(train(), SECONDS))
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["completed"]
    assert audit(tmp_path / "run") == 0
