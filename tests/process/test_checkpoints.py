"""What a run leaves of its weights, however it ends."""

import asyncio
import os
import shutil
import signal

import psutil
import pytest
import torch
from running import audit, events_of, make_trainer, published_weights, use

import pipeline as rl
from bench.small_models import write_small_model
from pipeline.checkpoints import checkpoints
from pipeline.checkpoints.saved import latest_checkpoint
from pipeline.models.model_directory import open_model
from pipeline.tasks import guess
from workers.errors import CheckpointError
from workers.model_files.config import read_model_config
from workers.model_files.flat_weights import load_flat

ROWS = guess.train_rows(0)
WRITTEN = {"model.safetensors", "optimizer.safetensors", "state.msgpack", "complete.msgpack"}  # whatever the model


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


def check_checkpoint(run_dir, version):
    """The run's last checkpoint is `version`'s, whole, logged before the end, and the audit accepts it."""
    path = run_dir / "checkpoints" / f"version-{version}"
    assert latest_checkpoint(run_dir) == path
    assert {*os.listdir(run_dir / "checkpoints")} == {"version-0", path.name}
    assert set(os.listdir(path)) == WRITTEN | {"config.json"}
    event = events_of(run_dir, "checkpoint")[-1]
    assert (event["version"], event["path"]) == (version, f"checkpoints/version-{version}")
    assert 0 < event["seconds"] < event["t"]
    assert [event["event"] for event in events_of(run_dir) if event["event"] != "wait"][-1] == "end"
    assert audit(run_dir) == 0
    return load_flat(path, read_model_config(path))


async def until(condition):
    """Waits for it; pytest's timeout is the bound."""
    while not condition():
        await asyncio.sleep(0.01)


def learner_pid(model):
    return model._run.workers.learner.pid


def test_a_completed_run_saves_what_it_has_published(model, tmp_path):
    trainer, published = make_trainer(model, tmp_path / "run"), []

    async def train():
        async for step in trainer.run(ROWS, steps=3):
            published.append((step.model_step, published_weights(model)))

    asyncio.run(train())
    version, weights = published[-1]
    assert torch.equal(check_checkpoint(tmp_path / "run", version), torch.from_numpy(weights))
    assert trainer.checkpoint == tmp_path / "run" / "checkpoints" / f"version-{version}"


def test_a_stopped_run_saves(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")
    steps = rl.run(trainer, ROWS, steps=100, on_step=lambda step: trainer.request_stop())
    assert trainer.stopped
    check_checkpoint(tmp_path / "run", steps[-1].model_step)


@pytest.mark.parametrize("leave", ["break", "cancel"])
def test_a_run_whose_caller_left_saves(model, tmp_path, leave):
    trainer = make_trainer(model, tmp_path / "run")

    async def train():
        steps = trainer.run(ROWS, steps=100)
        async for step in steps:
            if leave == "break":
                await steps.aclose()
                return step.model_step
            asyncio.current_task().cancel()

    if leave == "break":
        version = asyncio.run(train())
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(train())
        version = events_of(tmp_path / "run", "published")[-1]["version"]
    check_checkpoint(tmp_path / "run", version)


def test_a_run_whose_on_step_raised_saves(model, tmp_path):
    def fail(step):
        raise KeyError("of the caller's own")

    with pytest.raises(KeyError):
        rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=100, on_step=fail)
    check_checkpoint(tmp_path / "run", events_of(tmp_path / "run", "published")[-1]["version"])


def test_a_run_that_is_cancelled_after_a_stop_saves_nothing(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")

    async def train():
        async for _ in trainer.run(ROWS, steps=100):
            trainer.request_stop()
            asyncio.current_task().cancel()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(train())
    assert audit(tmp_path / "run") == 0
    assert latest_checkpoint(tmp_path / "run") == trainer.checkpoint
    assert trainer.checkpoint == tmp_path / "run" / "checkpoints" / "version-0"


def test_a_run_that_failed_beside_the_learner_saves(model, tmp_path):
    def refuse(trajectories, metrics):
        raise ValueError("the batch looks wrong")

    with pytest.raises(ValueError, match="the batch looks wrong"):
        rl.run(make_trainer(model, tmp_path / "run", validate_batch=refuse), ROWS, steps=3)
    check_checkpoint(tmp_path / "run", 0)


def test_an_update_that_has_begun_when_the_run_fails_is_saved_with_its_version(model, tmp_path):
    """The learner is held in an update while something else ends the run."""
    trainer = make_trainer(model, tmp_path / "run")

    async def fail_in_an_update(run, pid):
        await until(lambda: trainer.waits_for == "the learner, which trains batch 2")
        run.fail(rl.RunError("Something beside the learner broke."))
        await until(lambda: trainer.waits_for.startswith("the learner, which saves"))
        os.kill(pid, signal.SIGCONT)

    async def train():
        async for _ in trainer.run(ROWS, steps=3):
            os.kill(learner_pid(model), signal.SIGSTOP)
            failing = asyncio.create_task(fail_in_an_update(model._run, learner_pid(model)))
        await failing

    with pytest.raises(rl.RunError, match="Something beside the learner broke"):
        asyncio.run(train())
    check_checkpoint(tmp_path / "run", 2)


def train_and_hold_the_save(model, trainer, then):
    """One step, at whose end the learner stands still; then(pid, training) when it has been asked to save."""

    async def hold(pid, training):
        folder = trainer.run_directory / "checkpoints" / ".tmp-version-1"
        await until(lambda: (folder / "state.msgpack").exists())
        assert trainer.waits_for == "the learner, which saves version 1"
        then(pid, training)

    async def train():
        async for _ in trainer.run(ROWS, steps=1):
            pid = learner_pid(model)
            os.kill(pid, signal.SIGSTOP)
            holding = asyncio.create_task(hold(pid, asyncio.current_task()))
        await holding

    asyncio.run(train())


def test_a_learner_killed_in_a_save_makes_the_checkpoint_when_it_is_back(model, tmp_path):
    folder = tmp_path / "run" / "checkpoints"

    def kill(pid, training):
        assert sorted(os.listdir(folder)) == [".tmp-version-1", "version-0"]
        os.kill(pid, signal.SIGKILL)

    train_and_hold_the_save(model, make_trainer(model, tmp_path / "run"), kill)
    check_checkpoint(tmp_path / "run", 1)
    assert sorted(os.listdir(folder)) == ["version-0", "version-1"]
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["completed"]
    assert audit(tmp_path / "run") == 0


def test_a_cancellation_ends_a_save_at_once(model, tmp_path):
    """Nobody may have to wait for a large file: the learner is ended, and the next run gets a new one."""
    pids = []

    def cancel(pid, training):
        pids.append(pid)
        training.cancel()

    with pytest.raises(asyncio.CancelledError):
        train_and_hold_the_save(model, make_trainer(model, tmp_path / "run"), cancel)
    assert not psutil.pid_exists(*pids)
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["version-0"]
    assert audit(tmp_path / "run") == 0
    rl.run(make_trainer(model, tmp_path / "next"), ROWS, steps=1)
    check_checkpoint(tmp_path / "next", 1)


def test_a_save_that_the_learner_can_not_make_fails_the_run_and_nothing_else(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SINGLE", "absent/model.safetensors")
    with pytest.raises(CheckpointError, match="can't be written"):
        rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=1)
    assert os.listdir(tmp_path / "run" / "checkpoints") == []
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["failed"]
    monkeypatch.undo()
    rl.run(make_trainer(model, tmp_path / "next"), ROWS, steps=1)
    check_checkpoint(tmp_path / "next", 1)


def test_a_disk_without_room_for_the_weights_is_told_before_the_run(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(rl.ConfigError, match=rf"will take [\d,]+ bytes, and {tmp_path} has 1,000 free"):
        rl.run(make_trainer(model, tmp_path / "new" / "run"), ROWS, steps=1)
    assert not (tmp_path / "new").exists()


def test_what_a_killed_run_has_left_half_done_is_removed(model, tmp_path):
    leftover = tmp_path / "run" / "checkpoints" / ".tmp-version-9"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path / "run") is None
    rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=1)
    check_checkpoint(tmp_path / "run", 1)


def test_a_run_begins_from_the_weights_of_a_model_directory(model, tmp_path):
    """The last test here: from then on the Supervisor is of another model."""
    directory = write_small_model(tmp_path / "model", family="qwen3", dtype="bfloat16", tie=False, shards=2)
    config = read_model_config(directory)
    published = []

    async def train(training):
        async for step in training.run(ROWS, steps=1):
            published.extend(torch.from_numpy(published_weights(model, version)) for version in (0, step.model_step))

    use(model, open_model(directory, chat=guess.chat_format()))
    training = make_trainer(model, tmp_path / "run", optimizer=rl.Adam(lr=0.1))
    asyncio.run(train(training))
    assert torch.equal(published[0], load_flat(directory, config))
    assert not torch.equal(published[1], published[0])
    assert torch.equal(load_flat(training.checkpoint, config), published[1])
    kept = {path.name for path in directory.iterdir() if "safetensors" not in path.name}
    assert set(os.listdir(training.checkpoint)) == kept | WRITTEN
    for name in kept:
        assert (training.checkpoint / name).read_bytes() == (directory / name).read_bytes()
