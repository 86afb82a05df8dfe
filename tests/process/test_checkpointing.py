"""When a run saves, what it keeps, what it goes on from, and whose its directory is."""

import asyncio
import json
import os
import shutil
import warnings

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.checkpoints import checkpoints
from pipeline.checkpoints.saved import complete_checkpoints
from pipeline.journal.journal_files import Journal
from pipeline.journal.records import BatchRecord
from pipeline.run_dir import run_lock
from pipeline.run_dir.json_lines import JsonLines
from pipeline.run_dir.run_lock import owner
from pipeline.tasks import guess
from shm.block import Block
from shm.ledger import Ledger, LedgerShape
from workers.errors import CheckpointError

ROWS = guess.train_rows(0)


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


def test_a_disk_without_room_for_all_that_may_be_kept_is_warned_of(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_000_000))
    tiny = model.model_config
    with pytest.warns(rl.ConfigWarning, match="has 2,000,000 bytes free, and the run will save up to 3 checkpoints"):
        checkpoints.require_room(tmp_path, tiny, rl.Checkpointing())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.require_room(tmp_path, tiny, rl.Checkpointing(keep=1))


def saved_by(run_dir):
    """(checkpoints that are there, the journal's files that are there), oldest first."""
    files = [int(name.split(".")[0]) for name in os.listdir(run_dir / "journal") if name.endswith(".log")]
    return [one.version for one in reversed(complete_checkpoints(run_dir))], sorted(files)


def test_a_run_saves_every_so_many_updates_and_keeps_what_recovery_needs(model, tmp_path):
    """Every batch has a gradient here or not: versions are read from the log."""
    trainer = make_trainer(model, tmp_path / "run", checkpointing=rl.Checkpointing(weights_every=2, keep=2))
    steps = rl.run(trainer, ROWS, steps=8)
    last = steps[-1].model_step
    made = [event["version"] for event in events_of(tmp_path / "run", "checkpoint")]
    assert made == [*range(0, last, 2), last] or made == list(range(0, last + 1, 2))
    kept, files = saved_by(tmp_path / "run")
    assert kept[-2:] == made[-2:] and len(kept) <= 3  # one more if an owed group was older than the last but one
    oldest = complete_checkpoints(tmp_path / "run")[-1]
    assert files == list(range(oldest.journal, files[-1] + 1))
    assert audit(tmp_path / "run") == 0


def test_the_best_checkpoints_stay(model, tmp_path):
    evaluator = rl.Evaluator(ROWS[:2], every=2, group_size=1, final_group_size=1)
    checkpointing = rl.Checkpointing(weights_every=1, keep=1, keep_best=2)
    trainer = make_trainer(
        model, tmp_path / "run", evaluator=evaluator, checkpointing=checkpointing, optimizer=rl.Adam(lr=0.05)
    )
    rl.run(trainer, ROWS, steps=8)
    rewards = {one.version: one.reward_mean for one in trainer.evaluations}
    assert len(rewards) > 2
    best = sorted(rewards, key=lambda version: (rewards[version], version))[-2:]
    kept, _ = saved_by(tmp_path / "run")
    assert {*best, max(rewards)} <= {*kept} and len(kept) <= 4


def resumed(trainer, run_dir, steps, rows=ROWS):
    """The numbers of the steps that a resumed run trains."""

    async def train():
        return [step.n async for step in trainer.run(rows, steps, resume=run_dir)]

    return asyncio.run(train())


def test_a_damaged_newest_checkpoint_is_passed_over_with_one_warning(model, tmp_path):
    run_dir, options = tmp_path / "run", {"checkpointing": rl.Checkpointing(weights_every=2, keep=2)}
    rl.run(make_trainer(model, run_dir, **options), ROWS, steps=4)
    newest, second = complete_checkpoints(run_dir)[:2]
    os.truncate(newest.path / "optimizer.safetensors", 1000)
    with pytest.warns(rl.RunWarning) as warned:
        assert resumed(make_trainer(model, run_dir, **options), run_dir, 6) == [5, 6]
    (told,) = [str(one.message) for one in warned if "incomplete" in str(one.message)]
    assert f"version-{newest.version} is incomplete: its optimizer.safetensors has 1,000 bytes of" in told
    assert f"Version {second.version} is used in its place" in told
    assert audit(run_dir) == 0
    weights = complete_checkpoints(run_dir)[0].path / "model.safetensors"  # whole, but for one bit
    *all_but_last, last = weights.read_bytes()
    weights.write_bytes(bytes([*all_but_last, last ^ 1]))
    with pytest.warns(
        rl.RunWarning, match="is damaged: its model.safetensors is not what was saved. The learner goes on"
    ):
        assert resumed(make_trainer(model, run_dir, **options), run_dir, 7) == [7]
    assert audit(run_dir) == 0
    trained = [group for event in events_of(run_dir, "batch") for group in event["groups"]]
    assert len(trained) == len({*trained}) == 7 * 4
    for one in complete_checkpoints(run_dir):
        (one.path / "optimizer.safetensors").write_bytes(bytes((one.path / "optimizer.safetensors").stat().st_size))
    with pytest.raises(
        CheckpointError, match="damaged: its optimizer.safetensors is not .* there is no older one from"
    ):
        refused = make_trainer(model, run_dir, **options)
        resumed(refused, run_dir, 8)
    assert refused.checkpoint is None  # the closing lines name none to go on from


def test_a_run_goes_on_only_as_it_began(model, tmp_path):
    run_dir = tmp_path / "run"
    rl.run(make_trainer(model, run_dir), ROWS, steps=1)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for rows, options, named in (
        (ROWS[:-1], {}, r"rows.number was 4096 and is 4095"),
        (ROWS[::-1], {}, "rows.digest was"),
        (ROWS, {"optimizer": rl.Adam(lr=2e-3)}, "Adam.lr was 0.001 when the run began, and is 0.002 now"),
        (ROWS, {"checkpointing": rl.Checkpointing(keep=3)}, "Checkpointing.keep was 2"),
    ):
        with pytest.raises(rl.ConfigError, match=named):
            resumed(make_trainer(model, run_dir, **options), run_dir, 2, rows)
    with pytest.raises(rl.ConfigError, match="resume is .*run, and run_dir .*other; a run goes on in its own dir"):
        resumed(make_trainer(model, tmp_path / "other"), run_dir, 2)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_what_a_batch_measured_is_on_the_disk_before_the_next_one_counts(model, tmp_path, monkeypatch):
    """Else a power failure would keep the batches, and lose their lines."""
    done = []
    sync, append = JsonLines.sync, Journal.append
    monkeypatch.setattr(JsonLines, "sync", lambda lines: (sync(lines), done.append(lines._path.name)))
    monkeypatch.setattr(Journal, "append", lambda journal, record: (append(journal, record), done.append(record)))
    rl.run(make_trainer(model, tmp_path / "run", groups_per_step=1), ROWS, steps=3)
    of_batches = [one for one in done if one == "metrics.jsonl" or isinstance(one, BatchRecord)]
    assert [one if isinstance(one, str) else one.step for one in of_batches] == [
        *(1, "metrics.jsonl", 2, "metrics.jsonl", 3, "metrics.jsonl"),
    ]


def test_a_disk_without_room_ends_no_run_before_its_end(model, tmp_path, monkeypatch):
    trainer = make_trainer(model, tmp_path / "run", checkpointing=rl.Checkpointing(weights_every=1))
    usage = shutil.disk_usage

    def fill(step):
        if step.n == 1:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=5000))

    with pytest.warns(rl.RunWarning) as warned:
        with pytest.raises(CheckpointError, match=r"has 5,000 bytes free, and [\d,]+ are to be written"):
            rl.run(trainer, ROWS, steps=4, on_step=fill)
    assert any("The run goes on, and saves at" in str(one.message) for one in warned)
    assert len(events_of(tmp_path / "run", "batch")) == 4
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["failed"]
    assert saved_by(tmp_path / "run")[0] == [0, 1]
    assert audit(tmp_path / "run") == 0


def test_a_run_directory_belongs_to_one_run(model, tmp_path, monkeypatch):
    """The second run would be of another process; its refusal comes before it looks at anything."""
    monkeypatch.setattr(run_lock, "LOOK_SECONDS", 0.05)
    trainer = make_trainer(model, tmp_path / "run")
    before = []

    def resume(step):
        if step.n == 1:
            second = make_trainer(model, tmp_path / "run")
            assert owner(tmp_path / "run") == os.getpid()
            with pytest.raises(rl.ConfigError, match=rf"belongs to a run that goes on \(process {os.getpid()}\)"):
                next_step(second.run(ROWS, steps=3, resume=tmp_path / "run"))
            before.append(step)
            live = json.loads((tmp_path / "run" / "live.json").read_bytes())
            shape = LedgerShape(**live["ledger_shape"])
            with Block.open(live["ledger"]["path"], live["ledger"]["num_bytes"], writable=False) as block:
                assert Ledger(block.view, shape).policy_version() == step.model_step
            assert live["workers"] == {"learner": 0, "sampler-0": 1}

    rl.run(trainer, ROWS, steps=2, on_step=resume)
    assert before and owner(tmp_path / "run") is None and not (tmp_path / "run" / "live.json").exists()
    assert audit(tmp_path / "run") == 0


def next_step(run):
    """Of an async generator that is to raise before it awaits anything."""
    return run.__anext__().send(None)
