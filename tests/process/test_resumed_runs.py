"""A run that is killed goes on: nothing is lost, nothing is trained twice, and the weights are those it had.

What a kill leaves is what is on disk at that instant. So a run's directory is copied at instants of interest while it
runs, and each copy is resumed.
"""

import asyncio
import json
import shutil
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

import pipeline as rl
from pipeline.checkpoints.saved import complete_checkpoints
from pipeline.errors import ConfigError
from pipeline.journal.journal_files import Journal, read
from pipeline.journal.log_bookmark import read_bookmark
from pipeline.journal.log_state import LogState
from pipeline.journal.records import BatchRecord
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.json_lines import JsonLines, read_lines
from pipeline.tasks import guess
from pipeline.training.run_log import RunLog
from tests.process import process_envs
from tests.process.running import audit, events_of, make_trainer, metrics_of, published_weights
from workers.model import init_flat

ROWS = guess.train_rows(0)[:40]
STEPS = 10  # of 4 groups: each row is trained once
OPTIONS = {"repeat_dataset": False, "checkpointing": rl.Checkpointing(weights_every=3)}


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


@contextmanager
def copies(monkeypatch, run_dir, wanted):
    """Copy the run's directory at every instant that `wanted(name, count)` asks for: `name` happens for the `count`-th
    time. Yields the copies by (name, count).
    """
    made, counts = {}, Counter()

    def instant(name):
        counts[name] += 1
        if (run_dir / "journal").is_dir() and wanted(name, counts[name]):
            copy = run_dir.parent / f"{name.replace(' ', '-')}-{counts[name]}"
            shutil.copytree(run_dir, copy, ignore=lambda folder, names: [n for n in names if n.startswith(".tmp-")])
            made[name, counts[name]] = copy

    def watch(owner, method, name_of):
        original = getattr(owner, method)

        def watched(self, *arguments, **fields):
            instant(f"before {name_of(*arguments)}")
            result = original(self, *arguments, **fields)
            instant(f"after {name_of(*arguments)}")
            return result

        patch.setattr(owner, method, watched)

    with monkeypatch.context() as patch:
        watch(Journal, "append", lambda record: type(record).__name__)
        watch(Journal, "sync", lambda: "sync")
        watch(EventLog, "log", lambda event: event)
        watch(JsonLines, "flush", lambda: "flush")
        watch(JsonLines, "write", lambda line: "metrics" if "model_step" in line else "another line")
        yield made


def resume(model, run_dir, *, steps=STEPS, rows=ROWS, **options):
    """The steps that the resumed run takes."""
    trainer = make_trainer(model, run_dir, **(OPTIONS | options))

    async def go_on():
        return [step async for step in trainer.run(rows, steps, resume=run_dir)]

    return trainer, asyncio.run(go_on())


def begun(run_dir):
    """The steps of which the journal, as far as it goes back, or metrics.jsonl tells."""
    first = min(int(path.stem) for path in (run_dir / "journal").glob("*.log"))
    records = [record.step for record in read(run_dir, first) if isinstance(record, BatchRecord)]
    return {*records, *(line["step"] for line in metrics_of(run_dir))}


def told_of(run_dir):
    """The step of each line of trajectories.jsonl."""
    return [line["step"] for line in _lines(run_dir / "trajectories.jsonl")]


def check_whole(run_dir, steps=STEPS):
    """Every step has its line, every row was trained once, and the audit finds nothing."""
    assert [line["step"] for line in metrics_of(run_dir)] == list(range(1, steps + 1))
    rows = {event["group"]: event["row"] for event in events_of(run_dir, "admitted")}
    trained = [rows[group] for event in events_of(run_dir, "batch") for group in event["groups"]]
    assert sorted(trained) == list(range(4 * steps))
    assert audit(run_dir) == 0
    assert complete_checkpoints(run_dir)[0].version == metrics_of(run_dir)[-1]["model_step"]


def check_bookmark(run_dir):
    """It says what the log before it says, and is there when the second checkpoint is."""
    end, log = read_bookmark(run_dir, 10**9)
    whole = LogState()
    for begins, event in read_lines(run_dir / "events.jsonl"):
        if begins < end:
            whole.apply(event)
    assert log == whole and (end > 0 or len(events_of(run_dir, "checkpoint")) < 2)


# One before and one after everything that counts; those that are left out of the quick suite end in the same states.
INSTANTS = [
    ("after checkpoint", 1),  # nothing but the first checkpoint is there
    ("after Ready", 9),
    ("after segment", 100),
    ("after BatchRecord", 4),
    ("before optim", 6),
    ("before metrics", 5),  # the log tells all of the step
    ("after published", 10),
]
MORE_INSTANTS = [
    ("before checkpoint", 2),
    ("after published", 8),
    ("after optim", 7),
    ("before batch", 5),
    ("after admitted", 30),
    ("after Ready", 1),
    ("before ready", 20),
    ("before BatchRecord", 4),
    ("after sync", 6),
    ("after batch", 5),
    ("after checkpoint", 3),
    ("after batch", 10),
]


@pytest.fixture(scope="module")
def killed(model, tmp_path_factory):
    """Copies of one run's directory by instant, and the weights of each version."""
    folder = tmp_path_factory.mktemp("killed")
    weights = {0: init_flat(model.model_config, seed=0).numpy()}

    def keep_weights(step):
        weights[step.model_step] = published_weights(model)

    wanted = [*INSTANTS, *MORE_INSTANTS]
    with pytest.MonkeyPatch.context() as patch, copies(patch, folder / "run", lambda *at: at in wanted) as made:
        rl.run(make_trainer(model, folder / "run", **OPTIONS), ROWS, steps=STEPS, on_step=keep_weights)
    return made, weights


@pytest.mark.parametrize(
    "instant",
    [*INSTANTS, *(pytest.param(at, marks=pytest.mark.slow) for at in MORE_INSTANTS)],
    ids=lambda at: "{} {}".format(*at),
)
def test_a_run_killed_at_any_instant_goes_on_and_trains_each_row_once(model, killed, monkeypatch, instant):
    made, weights = killed
    run_dir, found = made[instant], {}
    before, had_begun = [line["step"] for line in metrics_of(run_dir)], begun(run_dir)
    began_at = len(events_of(run_dir, "published"))
    original = RunLog.started_again

    def note_weights(self):
        found[self._resumption.state.version] = published_weights(model)
        return original(self)

    monkeypatch.setattr(RunLog, "started_again", note_weights)
    check_bookmark(run_dir)
    _, steps = resume(model, run_dir)
    assert [step.n for step in steps] == list(range(len(before) + 1, STEPS + 1))
    check_whole(run_dir)
    check_bookmark(run_dir)
    told = told_of(run_dir)
    assert told == sorted({*told}) and had_begun <= {*told}  # of those since, if somebody has their conversations yet
    runs = events_of(run_dir, "run")
    assert [run.get("resumed", 0) for run in runs] == list(range(len(runs)))
    ((version, resumed),) = found.items()
    assert version in (began_at, began_at - 1)
    assert np.array_equal(resumed.view(np.int32), weights[version].view(np.int32)), "not the same bits"


def test_a_run_that_could_save_nothing_goes_on_from_its_first_weights(model, tmp_path, monkeypatch):
    """Each batch is trained again from the journal, and the one that has begun is taken again."""
    at = ("before optim", 4)
    options = {"checkpointing": rl.Checkpointing(weights_every=100)}
    weights = {}

    def keep_weights(step):
        weights[step.n] = published_weights(model)

    with copies(monkeypatch, tmp_path / "run", lambda *instant: instant == at) as made:
        trainer = make_trainer(model, tmp_path / "run", **(OPTIONS | options))
        rl.run(trainer, ROWS, steps=STEPS, on_step=keep_weights)
    run_dir, found = made[at], {}
    shutil.rmtree(run_dir / "checkpoints")
    original = RunLog.started_again

    def note_weights(self):
        found[len(metrics_of(run_dir))] = published_weights(model)
        return original(self)

    monkeypatch.setattr(RunLog, "started_again", note_weights)
    resume(model, run_dir, **options)
    check_whole(run_dir)
    ((steps, resumed),) = found.items()
    assert steps >= 3 and np.array_equal(resumed.view(np.int32), weights[steps].view(np.int32))


def test_a_run_may_be_killed_and_resumed_again_and_again(model, tmp_path, monkeypatch):
    run_dir, random = tmp_path / "run", np.random.default_rng(7)
    at = ("after segment", 60)
    with copies(monkeypatch, run_dir, lambda *instant: instant == at) as made:
        rl.run(make_trainer(model, run_dir, **OPTIONS), ROWS, steps=STEPS)
    for _ in range(3):
        run_dir, at = made[at], ("after segment", int(random.integers(20, 120)))
        with copies(monkeypatch, run_dir, lambda *instant: instant == at) as made:  # noqa: B023 (used at once)
            resume(model, run_dir)
        check_whole(run_dir)
    assert len(events_of(run_dir, "run")) == 4


WAYS = {
    "synchronous, in chunks": {
        "max_staleness": 0,
        "forward_backward_batch": rl.ForwardBackwardBatch(min_sequences=4, min_tokens=None),
    },
    "in order, with a reference": {"batch_order": "admission", "kl_coefficient": 0.1, "shuffle": True},
    "replaced groups": {"zero_variance": "replace", "repeat_dataset": True},
    "parts": {
        "stale_policy": "keep",
        "allow_unbounded_staleness": True,
        "repeat_dataset": True,
        "completion": rl.GroupCompletion(
            mode="deadline", min_members=2, on_stragglers="carry_over", max_straggler_tokens=2
        ),
        "advantage": rl.Batchwise(),
    },
    "discarded stragglers": {
        "stale_policy": "mask_span",
        "allow_trajectory_loss": True,
        "repeat_dataset": True,
        "completion": rl.GroupCompletion(
            mode="deadline", min_members=2, on_stragglers="discard", max_straggler_tokens=2
        ),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_goes_on(model, tmp_path, monkeypatch, way):
    options, run_dir = OPTIONS | WAYS[way], tmp_path / "run"
    wanted = [("after BatchRecord", 4), ("after segment", 90), ("after Ready", 11)]
    with copies(monkeypatch, run_dir, lambda *at: at in wanted) as made:
        rl.run(make_trainer(model, run_dir, **options), ROWS, steps=6)
    for copy in made.values():
        resume(model, copy, steps=6, **options)
        assert [line["step"] for line in metrics_of(copy)] == list(range(1, 7))
        assert audit(copy) == 0
        consumed = [group for event in events_of(copy, "batch") for group in event["groups"]]
        assert way == "parts" or len(consumed) == len(set(consumed)) == 24


def test_what_is_under_way_goes_on_with_its_tokens_when_its_environment_can_be_rebuilt(model, tmp_path, monkeypatch):
    """Stopped in order, nothing is thrown away. Killed, only what has moved on since its last save."""
    options = {"env": process_envs.Remembering, "checkpointing": rl.Checkpointing(weights_every=3, rollout_every=0.05)}
    run_dir, at = tmp_path / "run", ("after segment", 130)
    trainer = make_trainer(model, run_dir, **(OPTIONS | options))

    async def stop_in_the_middle():
        async for step in trainer.run(ROWS, steps=STEPS):
            if step.n == 3:
                trainer.request_stop()

    with copies(monkeypatch, run_dir, lambda *instant: instant == at) as made:
        asyncio.run(stop_in_the_middle())
    assert trainer.stopped
    for directory in (run_dir, made[at]):
        before = events_of(directory)
        resume(model, directory, **options)
        check_whole(directory)
        again = [event for event in events_of(directory, "retry") if event["cause"] == "the run was resumed"]
        went_on = [event for event in events_of(directory, "trajectory") if event not in before]
        began = {event["trajectory"] for event in before if event["event"] == "started"}
        went_on = {event["trajectory"] for event in went_on} & began - {event["trajectory"] for event in again}
        if directory == run_dir:
            assert went_on, "nothing was under way"
            assert not again
    assert sum(line["recovery/restored"] for line in metrics_of(run_dir)) > 0


def test_an_evaluation_that_a_kill_cut_off_is_made_of_the_same_version(model, tmp_path, monkeypatch):
    evaluator = rl.Evaluator(guess.holdout_rows()[:4], every=3, group_size=2, final_group_size=2)
    options, run_dir = {"evaluator": evaluator}, tmp_path / "run"
    with copies(monkeypatch, run_dir, lambda *at: at == ("after batch", 4)) as made:
        rl.run(make_trainer(model, run_dir, **OPTIONS, **options), ROWS, steps=STEPS)
    (copy,) = made.values()
    known = [line["batch"] for line in _lines(copy / "eval.jsonl")]
    trainer, _ = resume(model, copy, **options)
    results = _lines(copy / "eval.jsonl")
    assert [line["batch"] for line in results] == [0, 3, 6, 9, 10]
    assert [evaluation.batch for evaluation in trainer.evaluations] == [0, 3, 6, 9, 10]
    whole = {line["batch"]: line["row_rewards"] for line in _lines(run_dir / "eval.jsonl")}
    versions = {line["step"]: line["model_step"] for line in metrics_of(copy)} | {0: 0}
    for line in results:
        assert line["version"] == versions[line["batch"]]
        if line["batch"] <= 3:  # of versions that both runs had; fresh KV differs in the last bits, hardly in a word
            assert line["row_rewards"] == whole[line["batch"]]
    assert 3 not in known or len(known) == 2
    check_whole(copy)


def test_a_run_that_is_complete_is_left_as_it_is(model, tmp_path):
    run_dir = tmp_path / "run"
    rl.run(make_trainer(model, run_dir, **OPTIONS), ROWS, steps=2)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for steps in (2, 1):
        trainer, taken = resume(model, run_dir, steps=steps)
        assert trainer.was_complete and not taken
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    trainer, taken = resume(model, run_dir, steps=4)
    assert not trainer.was_complete and [step.n for step in taken] == [3, 4]
    check_whole(run_dir, steps=4)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"groups_per_step": 5}, "groups_per_step"),
        ({"optimizer": rl.Adam(lr=2e-3)}, "lr"),
        ({"rows": ROWS[:39]}, "rows"),
        ({"rows": [ROWS[1], ROWS[0], *ROWS[2:]]}, "rows"),
        ({"sampling": {"temperature": 0.9}}, "temperature"),
    ],
)
def test_another_recipe_or_other_rows_are_refused_by_name(model, tmp_path_factory, changed, told):
    run_dir = tmp_path_factory.getbasetemp() / "one-step"
    if not run_dir.is_dir():
        rl.run(make_trainer(model, run_dir, **OPTIONS), ROWS, steps=1)
    with pytest.raises(ConfigError, match=told):
        resume(model, run_dir, **changed)


def _lines(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_a_recipe_that_was_edited_in_config_json_is_refused_by_name(model, tmp_path):
    """Whoever builds the trainer from that file, as the command line does, would not see it otherwise."""
    run_dir = tmp_path / "run"
    rl.run(make_trainer(model, run_dir, **OPTIONS), ROWS, steps=1)
    config = run_dir / "config.json"
    config.write_text(config.read_text().replace('"lr": 0.001', '"lr": 0.009'))
    with pytest.raises(ConfigError, match=r"lr was 0\.001 when the run began, and is 0\.009 now"):
        resume(model, run_dir, optimizer=rl.Adam(lr=9e-3))
