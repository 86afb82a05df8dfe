"""What a run saves is where its journal stood, and what recovery may need stays, whoever needs it."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pipeline.checkpoints.checkpoints import Checkpoints
from pipeline.checkpoints.saved import find_checkpoints
from pipeline.config import Checkpointing
from pipeline.journal.journal_files import Journal, read
from pipeline.journal.log_bookmark import LogBookmark, read_bookmark
from pipeline.journal.log_state import LogState
from pipeline.journal.recorder import Recorder
from pipeline.journal.records import Admitted, BatchRecord, Ready
from pipeline.journal.run_state import RunState
from pipeline.run_dir.events import EventLog
from pipeline.schedule import Admission
from pipeline.training.resumption import read_resumption
from pipeline.training.run_history import RunHistory
from pipeline.training.run_saver import RunSaver
from pipeline.trajectory import Group, Trajectory
from pipeline.user_warnings import RunWarning
from tests.fake_learner import FakeRun
from workers.errors import CheckpointError


class Rollouts:
    async def save(self):
        pass


class Play:
    """A run whose batches are of one group, admitted when the one before is trained."""

    def __init__(self, run_dir, **options):
        self.run_dir, self.groups = run_dir, 0
        events = EventLog(run_dir / "events.jsonl", time.monotonic)
        self.journal = Journal(run_dir)
        self.recorder = Recorder(self.journal, events)
        self.run = FakeRun()
        self.run.slots = SimpleNamespace(leased=[])
        checkpoints = Checkpoints(run_dir, {"config.json": b"{}"}, events, Checkpointing(weights_every=1, **options))
        bookmark = LogBookmark(run_dir, events, LogState())
        self.saver = RunSaver(checkpoints, self.journal, self.recorder, self.run, Rollouts(), bookmark, recipe={})

    def admit(self):
        self.recorder.admitted(Admission(self.groups, self.groups, self.recorder.state.version), None)
        self.groups += 1
        return self.groups - 1

    def train(self, group):
        state, row = self.recorder.state, group
        self.recorder.ready(Group(group, row, state.outstanding[group].version, [Trajectory(group, 0, row)]))
        arguments = {"lr": 0.1, "gradient_scale": 1.0, "chunks": (), "updated": True, "members": None}
        counts = dict.fromkeys(("tokens", "masked", "dropped", "age_min", "age_max"), 0)
        self.recorder.batch(BatchRecord(state.batches + 1, state.version, (group,), **arguments, **counts))
        state.finish_batch()

    def save(self):
        asyncio.run(self.saver.save())

    def saved(self):
        return [one.version for one in find_checkpoints(self.run_dir)[0]]

    def history(self):
        return RunHistory(self.run_dir, self.saver._checkpoints.damaged)

    def latest(self):
        """The newest checkpoint, as the run's end tells."""
        latest = self.saver._checkpoints.latest
        return latest and latest.name

    def can_reach(self, version):
        """Whether replay comes from a base to `version`."""
        history = self.history()
        base, _ = history.base(version)
        return len(list(history.updates(base, version))) == version - base


@pytest.mark.parametrize("needed_by", ["nobody", "a lease", "a group", "a ready group", "an evaluation"])
def test_versions_that_somebody_needs_can_be_had_again(tmp_path, needed_by):
    play = Play(tmp_path, keep=2)
    play.save()
    for version in range(5):
        if version == 1:
            if needed_by in ("a group", "a ready group"):
                owed = play.admit()
                if needed_by == "a ready group":
                    play.recorder.ready(Group(owed, owed, 1, [Trajectory(owed, 0, owed)]))
            play.run.slots.leased = [1] if needed_by == "a lease" else []
            play.saver.evaluations = SimpleNamespace(owed_version=1 if needed_by == "an evaluation" else None)
        play.train(play.admit())
        play.save()
    assert play.saved() == ([5, 4] if needed_by == "nobody" else [5, 4, 1])
    if needed_by != "nobody":
        assert all(play.can_reach(version) for version in range(1, 6))


def test_each_save_marks_where_the_log_stands(tmp_path):
    play = Play(tmp_path)
    for decisions in (0, 3, 6):
        play.save()
        end, log = read_bookmark(tmp_path, 100)
        assert (end, log.num_decisions) == ((tmp_path / "events.jsonl").stat().st_size, decisions)
        play.train(play.admit())


def with_four_updates(run_dir, **options):
    play = Play(run_dir, **options)
    play.save()
    for _ in range(4):
        play.train(play.admit())
        play.save()
    return play


def flip(run_dir, version, name="model.safetensors"):
    path = run_dir / "checkpoints" / f"version-{version}" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_set_aside_and_the_journal_leads_on_from_an_older_one(tmp_path, name):
    play = with_four_updates(tmp_path)
    assert play.saved() == [4, 3]
    flip(tmp_path, 4, name)
    with pytest.warns(RunWarning) as caught:
        assert play.history().base(4) == (3, tmp_path / "checkpoints" / "version-3")
    (told,) = [str(warning.message) for warning in caught]
    assert f"version-4 is damaged: its {name} is not what was saved. The learner goes on from version 3 and the" in told
    assert "damaged-version-4" in told and (tmp_path / "checkpoints" / "damaged-version-4").is_dir()
    assert play.saved() == [3] and play.can_reach(4)
    assert play.latest() == "version-3"
    play.save()  # it is not taken for saved any more
    assert play.saved() == [4, 3]
    flip(tmp_path, 4)  # once more
    with pytest.warns(RunWarning, match="damaged-version-4"):
        assert play.history().base(9)[0] == 3


def test_damage_in_what_is_not_loaded_is_not_looked_for(tmp_path):
    play = with_four_updates(tmp_path)
    flip(tmp_path, 4)
    assert play.history().base(3)[0] == 3 and play.saved() == [4, 3]
    assert play.latest() == "version-4"


def test_a_damaged_checkpoint_without_a_journal_before_it_is_told_and_stays(tmp_path):
    play = with_four_updates(tmp_path, keep=1, keep_best=1)
    assert play.saved() == [4]
    flip(tmp_path, 4)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"version-4 is damaged: its model\.safetensors is not .* good copy"):
            play.history().base(4)
    assert play.saved() == [4] and play.latest() is None


def test_one_kept_for_its_weights_alone_does_not_stand_in_for_a_damaged_one(tmp_path):
    play = Play(tmp_path, keep=1, keep_best=1)
    play.saver._checkpoints.scored(1, 1.0)
    play.save()
    for _ in range(4):
        play.train(play.admit())
        play.save()
    assert play.saved() == [4, 1]
    flip(tmp_path, 4)
    with pytest.raises(CheckpointError, match="there is no older one from which the journal leads on"):
        play.history().base(4)
    assert play.latest() is None  # though version 1 is whole: no run goes on from it


def test_with_the_whole_journal_the_first_weights_stand_in_for_a_damaged_one(tmp_path):
    play = Play(tmp_path)
    play.save()
    play.train(play.admit())
    play.save()
    flip(tmp_path, 0)
    flip(tmp_path, 1)
    with pytest.warns(RunWarning, match="goes on from the model that the run began with and the journal"):
        assert play.history().base(1) == (0, None)
    assert play.saved() == [] and play.can_reach(1) and play.latest() is None


def test_state_and_journal_of_a_checkpoint_are_of_one_instant(tmp_path):
    """What is decided while the learner writes comes after the state, in the file that the state names."""
    play = Play(tmp_path)
    play.save()

    class Slow(FakeRun):
        slots = SimpleNamespace(leased=[])

        async def save_weights(self, version, path, optimizer_path):
            play.admit()
            return await super().save_weights(version, path, optimizer_path)

    play.train(play.admit())
    play.saver._run = Slow()
    play.save()
    play.admit()
    saved = find_checkpoints(tmp_path)[0][0]
    state = RunState.from_plain(saved.state()["run"])
    assert (state.version, state.admitted) == (1, 1)
    assert [record.group for record in read(tmp_path, saved.journal) if isinstance(record, Admitted)] == [1, 2]
    for record in read(tmp_path, saved.journal):
        assert not isinstance(record, Ready)
        state.apply(record)
    assert state == play.recorder.state


def test_a_version_that_is_saved_is_not_saved_again(tmp_path):
    play = Play(tmp_path)
    play.save()
    play.admit()
    files = sorted(path.name for path in (tmp_path / "journal").iterdir())
    play.save()
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == files
    assert len(list(read(tmp_path, find_checkpoints(tmp_path)[0][0].journal))) == 1


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_step_is_complete_when_its_metrics_are_there(tmp_path, is_complete):
    play = Play(tmp_path)
    run = {"mode": "async", "version": 0, "group_size": 1, "on_stragglers": "truncate", "stale_policy": "wait"}
    run |= dict.fromkeys(("admit_ahead", "concurrency", "groups_per_step", "max_staleness", "oversample_factor"), 1)
    play.recorder._events.log("run", steps=9, **run)
    play.save()
    play.train(play.admit())
    play.recorder._events.flush()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "model_step": 1}\n' if is_complete else "")
    lines = [f'{{"step": {step}}}\n' for step in (1, 1, 2)]  # of the last one no record tells
    (tmp_path / "trajectories.jsonl").write_text("".join(lines))
    state = read_resumption(tmp_path).state
    assert (tmp_path / "trajectories.jsonl").read_text() == "".join(lines[:2])
    assert (state.training is None, state.batches, state.version) == (is_complete, int(is_complete), int(is_complete))


def test_an_evaluation_whose_line_was_torn_is_told_to_be_lost(tmp_path):
    play = Play(tmp_path)
    play.save()
    results = tmp_path / "eval.jsonl"
    results.write_text('{"batch": 0, "rewa')
    with pytest.warns(RunWarning, match=r"eval\.jsonl was torn, and is cut off: what that evaluation measured is lost"):
        assert read_resumption(tmp_path).evaluations == ()
    assert results.read_text() == ""
