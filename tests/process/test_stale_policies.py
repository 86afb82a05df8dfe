"""What may train when it has got old: a run per stale policy, and who is waited for meanwhile."""

import asyncio
import re
import time
from dataclasses import replace

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.batches.make_batch import make_batch
from pipeline.tasks import guess
from workers.errors import WorkerDied

ROWS = guess.train_rows(0)[:64]
ALLOWED = {
    "wait": {},
    "mask_span": {"allow_trajectory_loss": True},
    "keep": {"allow_unbounded_staleness": True},
}


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def held_rows(*held):
    """The rows `held` wait, in their first guess, for a file `release.<row>`."""
    return [
        dict(row, waits_for=[f"release.{index}"] if index in held else [], row=index) for index, row in enumerate(ROWS)
    ]


def held_trainer(model, tmp_path, **options):
    return make_trainer(
        model, tmp_path / "run", env="process_envs:HeldGuess", arguments={"directory": str(tmp_path)}, **options
    )


def train_watched(trainer, rows, steps, on_wait=lambda words: None, on_step=lambda step: None):
    """`on_wait` is called again and again with what the trainer waits for."""

    async def train():
        async def watch():
            while True:
                on_wait(trainer.waits_for)
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        done = []
        async for step in trainer.run(rows, steps):
            on_step(step)
            done.append(step)
        watching.cancel()
        return done

    return asyncio.run(train())


@pytest.mark.filterwarnings("ignore:.*lets tokens get older")
@pytest.mark.parametrize("policy", ["mask_span", "keep"])
def test_group_that_is_older_than_the_bound_is_masked_or_kept(model, tmp_path, policy):
    def let_go(step):
        if step.n == 4:  # from here on three updates beyond the bound of 1
            (tmp_path / "release.0").touch()

    trainer = held_trainer(model, tmp_path, max_staleness=1, stale_policy=policy, **ALLOWED[policy])
    steps = train_watched(trainer, held_rows(0), 12, on_step=let_go)
    (batch,) = [event for event in events_of(tmp_path / "run", "batch") if 0 in event["groups"]]
    assert batch["age_max"] >= 4
    trained = steps[batch["step"] - 1].metrics
    assert trained["staleness/span_age_max"] == batch["age_max"]
    assert (trained["staleness/frac_masked"] > 0) == (batch["masked"] > 0) == (policy == "mask_span")
    assert trained["staleness/trained_age_max"] == (batch["age_max"] if policy == "keep" else 1)  # what the learner saw
    assert all(step.metrics["staleness/wait_count"] == step.metrics["staleness/reserved_groups"] == 0 for step in steps)
    assert audit(tmp_path / "run") == 0


@pytest.mark.filterwarnings("ignore:.*(lets tokens get older|computes whole prefixes again)")
def test_old_segments_are_masked_while_new_ones_of_the_same_trajectory_train(model, tmp_path):
    """By segments: group 0 makes its first guess under version 0, and the next ones when that is long too old."""

    def let_go(step):
        if step.n == 4:
            (tmp_path / "release.0").touch()

    kv_cache = rl.KVCache(on_limit="refill", allow_reprefill=True)
    trainer = held_trainer(
        model,
        tmp_path,
        max_staleness=1,
        stale_policy="mask_span",
        sampling={"sampling_policy": "segment", "kv_cache": kv_cache},
        **ALLOWED["mask_span"],
    )
    steps = train_watched(trainer, held_rows(0), 12, on_step=let_go)
    (batch,) = [event for event in events_of(tmp_path / "run", "batch") if 0 in event["groups"]]
    segments = [event for event in events_of(tmp_path / "run", "segment") if event["group"] == 0]
    old = sum(event["tokens"] for event in segments if batch["version"] - event["version"] > 1)
    assert 0 < old < sum(event["tokens"] for event in segments) and batch["masked"] >= old
    assert steps[batch["step"] - 1].metrics["staleness/trained_age_max"] <= 1  # what the learner saw
    assert audit(tmp_path / "run") == 0


@pytest.mark.filterwarnings("ignore:.*lets tokens get older")
def test_step_waits_for_a_slot_when_old_trajectories_lease_them_all(model, tmp_path):
    """Three slots: group 0 holds version 0, group 8 version 1, and version 2 is the committed one."""
    seen = []

    def let_go(words):
        if "weight slots are leased" in words:
            seen.append(words)
            (tmp_path / "release.0").touch()
            (tmp_path / "release.8").touch()

    trainer = held_trainer(model, tmp_path, max_staleness=1, stale_policy="keep", **ALLOWED["keep"])
    steps = train_watched(trainer, held_rows(0, 8), 4, on_wait=let_go)
    assert re.search(r"trajectory 0\.\d holds the oldest .* and is in: \w.* for \d+ s, ended by environment_t", seen[0])
    waits = [event for event in events_of(tmp_path / "run", "wait") if event["why"] == "slot"]
    assert {(event["step"], event["group"]) for event in waits} == {(3, 0)}
    assert sum(event["seconds"] for event in waits) == pytest.approx(
        steps[2].metrics["staleness/slot_wait_seconds"], abs=0.05
    )
    assert [step.n for step in steps if step.metrics["staleness/slot_wait_seconds"] > 0] == [3]
    assert all(step.metrics["staleness/wait_seconds"] == 0 for step in steps)
    assert audit(tmp_path / "run") == 0


@pytest.mark.filterwarnings("ignore:.*lets tokens get older")
def test_stop_during_a_wait_for_a_slot_leaves_the_batch_untrained(model, tmp_path):
    def stop(words):
        if "weight slots are leased" in words:
            trainer.request_stop()

    trainer = held_trainer(model, tmp_path, max_staleness=1, stale_policy="keep", **ALLOWED["keep"])
    steps = train_watched(trainer, held_rows(0, 8), 4, on_wait=stop)
    assert trainer.stopped and [step.n for step in steps] == [1, 2]
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["steps"], end["consumed"]) == ("stopped", 2, 8)
    assert audit(tmp_path / "run") == 0


def test_surplus_groups_stay_eligible(model, tmp_path):
    """With half a batch of surplus, the first batch does without group 0, which trains in a later one."""

    def let_go(step):
        if step.n == 1:
            (tmp_path / "release.0").touch()

    schedule = rl.Schedule(concurrency=64, admit_ahead=0, oversample_factor=1.5)
    trainer = held_trainer(model, tmp_path, schedule=schedule)
    train_watched(trainer, held_rows(0), 6, on_step=let_go)
    events = events_of(tmp_path / "run")
    batches = [event for event in events if event["event"] == "batch"]
    before_first = events[: events.index(batches[0])]
    assert sum(event["event"] == "admitted" for event in before_first) == 6
    assert [event["step"] for event in batches if 0 in event["groups"]] in ([2], [3])
    assert len({group for event in batches for group in event["groups"]}) == 6 * 4  # each its own, none dropped
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["consumed"], end["outstanding"]) == (24, 0)
    assert audit(tmp_path / "run") == 0


def test_very_slow_members_keep_their_place_and_every_wait_is_explained(model, tmp_path):
    """max_staleness 4, a trainer that dawdles, and members that end only when the trainer stands still for them."""
    slow = (0, 6, 12)

    def let_go(words):
        for row in slow:
            if words.startswith(f"group {row} must train by version"):
                (tmp_path / f"release.{row}").touch()

    trainer = held_trainer(
        model,
        tmp_path,
        schedule=rl.Schedule(concurrency=64, admit_ahead=4),
        max_staleness=4,
        groups_per_step=2,
        validate_batch=lambda trajectories, metrics: time.sleep(0.02),
    )
    rows = [dict(row, held_once=row["waits_for"][0]) if row["waits_for"] else row for row in held_rows(*slow)]
    rows = [dict(row, waits_for=[]) for row in rows]
    steps = train_watched(trainer, rows, 16, on_wait=let_go)
    run_dir = tmp_path / "run"
    batches = events_of(run_dir, "batch")
    assert max(event["age_max"] for event in batches) == 4
    assert [event["dropped"] + event["masked"] for event in batches] == [0] * 16
    assert sorted(group for event in batches for group in event["groups"]) == list(range(32))
    assert not events_of(run_dir, "discarded") and not events_of(run_dir, "retry")

    waits = [event for event in events_of(run_dir, "wait") if event["why"] != "ready"]
    assert {event["group"] for event in waits} >= set(slow)
    # Between the start of each slow member and its first guess the others made more than 20.
    events = events_of(run_dir)
    for row in slow:
        (name,) = {event["trajectory"] for event in waits if event["group"] == row}
        own = [
            i for i, event in enumerate(events) if event["event"] in ("started", "tool") and event["trajectory"] == name
        ]
        between = events[own[0] : own[1]]
        assert sum(event["event"] == "tool" for event in between) > 20
    for event in waits:
        assert event["why"] in ("tool", "sampling", "queue", "reward")
        assert event["trajectory"].startswith(f"{event['group']}.") and event["trajectory"] in event["detail"]
    waited = sum(step.metrics["staleness/wait_seconds"] for step in steps)
    assert waited == pytest.approx(sum(event["seconds"] for event in waits), abs=0.2)
    assert audit(run_dir) == 0


@pytest.mark.filterwarnings("ignore:.*lets tokens get older")
def test_learner_refuses_an_old_token_that_the_supervisor_forgot_to_mask(model, tmp_path, monkeypatch):
    """The last test here: the learner ends with it."""

    def unmasked(groups, version, rules):
        return make_batch(groups, version, replace(rules, mask_older_than=None))

    monkeypatch.setattr("pipeline.training.training_loop.make_batch", unmasked)

    def let_go(step):
        if step.n == 3:
            (tmp_path / "release.0").touch()

    trainer = held_trainer(model, tmp_path, max_staleness=1, stale_policy="mask_span", **ALLOWED["mask_span"])
    with pytest.raises(WorkerDied, match=r"learner.*segment of policy version 0.*max_staleness allows 1"):
        train_watched(trainer, held_rows(0), 40, on_step=let_go)
