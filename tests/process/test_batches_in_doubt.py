"""A batch whose record is on disk and whose update is not made when the run ends: no checkpoint tells of it, and the
resumed run takes it again.
"""

import asyncio

import pytest
from running import audit, events_of, make_trainer, metrics_of

import pipeline as rl
from pipeline.checkpoints.saved import complete_checkpoints
from pipeline.errors import RunError
from pipeline.tasks import guess
from pipeline.training.training_loop import TrainingLoop

ROWS = guess.train_rows(0)[:40]
STEPS = 4
OPTIONS = {"repeat_dataset": False, "checkpointing": rl.Checkpointing(weights_every=10)}


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


def resumed(trainer, run_dir):
    """The numbers of the steps that it takes."""

    async def go_on():
        return [step.n async for step in trainer.run(ROWS, STEPS, resume=run_dir)]

    return asyncio.run(go_on())


def test_a_run_that_ends_between_a_batch_s_record_and_its_update_says_why_and_goes_on(model, tmp_path, monkeypatch):
    """It fails there; resumed, it is stopped before it has taken that batch again; resumed once more, it goes on."""
    run_dir, train, take_again = tmp_path / "run", TrainingLoop._train, TrainingLoop.take_again

    def train_until_the_disk_is_full(self, record, *arguments, **options):
        if record.step == 3:
            raise RunError("The disk is full.")
        return train(self, record, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_train", train_until_the_disk_is_full)
        with pytest.raises(RunError, match=r"^The disk is full\.$"):
            rl.run(make_trainer(model, run_dir, **OPTIONS), ROWS, steps=STEPS)
    (end,) = events_of(run_dir, "end")
    assert (end["status"], end["steps"], len(metrics_of(run_dir))) == ("failed", 3, 2)

    trainer = make_trainer(model, run_dir, **OPTIONS)

    def stopped(self, *arguments):
        trainer.request_stop()
        return take_again(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "take_again", stopped)
        assert resumed(trainer, run_dir) == [] and trainer.stopped
    assert audit(run_dir) == 0

    assert resumed(make_trainer(model, run_dir, **OPTIONS), run_dir) == [3, 4]
    assert [line["step"] for line in metrics_of(run_dir)] == [1, 2, 3, 4]
    trained = [group for event in events_of(run_dir, "batch") for group in event["groups"]]
    assert len(trained) == len({*trained}) == 4 * STEPS
    assert complete_checkpoints(run_dir)[0].version == metrics_of(run_dir)[-1]["model_step"]
    assert audit(run_dir) == 0
