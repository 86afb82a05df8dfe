"""An evaluation that was cut off is made of the same version by the run that goes on, however far training was."""

import asyncio
import os

import pytest

import pipeline as rl
from pipeline.tasks import guess
from tests.process import process_envs
from tests.process.running import audit, make_trainer

ROWS = guess.train_rows(0)


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


def make(model, directory):
    """A trainer whose first evaluation lasts until there is a file `open` in `directory`. Nothing but an evaluation
    asks for a version before the newest.
    """
    held = [{"number": 3, "seed": 1, "waits_for": ["open"]}]
    return make_trainer(
        model,
        directory / "run",
        process_envs.HeldGuess,
        arguments={"directory": str(directory)},
        max_staleness=0,
        groups_per_step=2,
        group_size=2,
        evaluator=rl.Evaluator(held, every=100, group_size=1, final_group_size=0),
        checkpointing=rl.Checkpointing(weights_every=1, keep=1),
    )


def stop_after(trainer, batches, *, evaluations=0):
    async def train():
        async for step in trainer.run(ROWS, steps=6):
            if step.n == batches:
                while evaluations > len(trainer.evaluations):
                    await asyncio.sleep(0.01)
                trainer.request_stop()

    asyncio.run(train())
    assert trainer.stopped


def steps_of_resumed(trainer, run_dir):
    async def train():
        return [step.n async for step in trainer.run(ROWS, steps=6, resume=run_dir)]

    return asyncio.run(train())


def test_an_evaluation_that_a_stop_cut_off_is_made_when_the_run_goes_on(model, tmp_path):
    stop_after(make(model, tmp_path), 4)
    (tmp_path / "open").touch()
    trainer = make(model, tmp_path)
    assert steps_of_resumed(trainer, tmp_path / "run") == [5, 6]
    assert [(one.batch, one.version) for one in trainer.evaluations] == [(0, 0)]
    assert audit(tmp_path / "run") == 0


def test_a_run_goes_on_without_the_results_of_evaluations(model, tmp_path):
    """Their version can't be had again, as nobody was to ask for it."""
    (tmp_path / "open").touch()
    stop_after(make(model, tmp_path), 4, evaluations=1)
    os.remove(tmp_path / "run" / "eval.jsonl")
    trainer = make(model, tmp_path)
    assert steps_of_resumed(trainer, tmp_path / "run") == [5, 6]
    assert not trainer.evaluations
    assert audit(tmp_path / "run") == 0
