"""Whose noise and whose weights make a segment, in real runs whose replies cross updates, each segment recomputed."""

import asyncio
import os
import signal

import pytest
from babble import (
    CHAT,
    SECONDS,
    SEGMENT_TOKENS,
    TURN_TOKENS,
    Recorder,
    hold_requests_of_group_0,
    make_trainer,
    stop_sampler_in_mid_reply,
)
from running import audit, events_of

import pipeline as rl
from pipeline.processes.worker import run_blocks
from workers.errors import WorkerDied
from workers.transfer import IN_PIECES, Outbox

ROWS = [{"prompt": f"w{index} w{index + 7}", "turns": 2} for index in range(40)]
SAME_ROWS = [{"prompt": "w3 w4", "turns": 1}] * 2


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", samplers=2, chat=CHAT, check_weights=True) as supervisor:
        yield supervisor


def train_across_updates(model, run_dir, monkeypatch, sampling):
    """Six updates, the first in the middle of a reply of group 0; the record of all, and the steps."""
    recorder, steps = Recorder().watch(monkeypatch), []
    hold_requests_of_group_0(monkeypatch)
    trainer = make_trainer(model, run_dir, sampling=sampling, groups_per_step=1, group_size=2, max_staleness=4)

    async def train():
        stopped = asyncio.create_task(stop_sampler_in_mid_reply(model))
        async for step in trainer.run(ROWS, steps=6):
            if step.n == 1:
                recorder.keep_weights(model, 0)
            recorder.keep_weights(model, step.model_step)
            steps.append(step)
        await stopped

    asyncio.run(asyncio.wait_for(train(), 2 * SECONDS))
    assert audit(run_dir) == 0
    assert recorder.leases == [0] * 6  # of max_staleness + 2 slots
    for batch in events_of(run_dir, "batch"):  # however new its last segment is, a group is as old as its oldest
        oldest = min(one.version for member in (0, 1) for one in recorder.segments[batch["groups"][0], member])
        assert batch["age_max"] == batch["version"] - oldest
    return recorder, steps


def versions_of(recorder, group, member):
    return [(one.version, one.kv_version) for one in recorder.segments[group, member]]


def assert_published_in_mid_reply(run_dir):
    """Some member of group 0 got its first reply, of version 0, when version 1 was there already."""
    events = events_of(run_dir)
    published = next(i for i, event in enumerate(events) if event["event"] == "published")
    replies = [
        event["version"]
        for event in events[published:]
        if event["event"] == "segment" and event["group"] == 0 and event["version"] == 0
    ]
    assert replies, "no reply of group 0 was under way"


def test_pinned_trajectory_keeps_its_version_across_updates(model, tmp_path, monkeypatch):
    recorder, steps = train_across_updates(model, tmp_path / "run", monkeypatch, {})
    assert_published_in_mid_reply(tmp_path / "run")
    for member in (0, 1):
        assert versions_of(recorder, 0, member) == [(0, 0)] * 6
    assert all(len({one.version for one in segments}) == 1 for segments in recorder.segments.values())
    assert {event["version"] for event in events_of(tmp_path / "run", "started") if event["group"] == 0} == {0}
    assert sum(step.metrics["sampling/kv_refreshes"] for step in steps) == 0
    recorder.prove(model, kv_max_age=0)


def assert_rises(recorder, run_dir, limit):
    """Versions never fall, within a turn too; no segment is older than its group, no KV older than its limit."""
    admitted = {event["group"]: event["version"] for event in events_of(run_dir, "admitted")}
    for (group, _), segments in recorder.segments.items():
        versions = [one.version for one in segments]
        assert versions == sorted(versions)
        for one in segments:
            assert admitted[group] <= one.kv_version <= one.version
            assert one.version - one.kv_version <= limit
    assert {event["version"] for event in events_of(run_dir, "started")} == {None}
    told = [event for event in events_of(run_dir, "segment") if event["trajectory"] == "0.0"]
    assert [(event["version"], event["kv_version"]) for event in told] == versions_of(recorder, 0, 0)


def test_hold_moves_to_the_newest_version_that_the_kv_allows(model, tmp_path, monkeypatch):
    sampling = {"sampling_policy": "segment", "kv_cache": rl.KVCache(max_staleness=2)}
    recorder, steps = train_across_updates(model, tmp_path / "run", monkeypatch, sampling)
    assert_published_in_mid_reply(tmp_path / "run")
    assert_rises(recorder, tmp_path / "run", limit=2)
    for member in (0, 1):
        first, *others = versions_of(recorder, 0, member)
        assert first == (0, 0)
        in_turn = [version for version, _ in others[: TURN_TOKENS // SEGMENT_TOKENS - 1]]
        assert 1 <= in_turn[0] <= in_turn[1] == 2
        assert others[2:] == [(2, 0)] * 3  # although version 3 is there: the KV is of version 0
        assert all(one.cached for one in recorder.segments[0, member][1:])
    assert sum(step.metrics["sampling/kv_refreshes"] for step in steps) == 0
    recorder.prove(model, kv_max_age=2)


def test_refill_always_takes_the_newest_version_and_rebuilds_kv_that_is_too_old(model, tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="computes whole prefixes again"):
        kv_cache = rl.KVCache(max_staleness=1, on_limit="refill", allow_reprefill=True)
    sampling = {"sampling_policy": "segment", "kv_cache": kv_cache}
    recorder, steps = train_across_updates(model, tmp_path / "run", monkeypatch, sampling)
    assert_published_in_mid_reply(tmp_path / "run")
    assert_rises(recorder, tmp_path / "run", limit=1)
    rebuilt = 0
    for segments in recorder.segments.values():
        for before, one in zip(segments, segments[1:], strict=False):
            if one.version - before.kv_version > 1:
                rebuilt += 1
                assert (one.kv_version, one.cached) == (one.version, 0)
            elif one.version > before.version:
                assert one.kv_version == before.kv_version and one.cached > 0
    for member in (0, 1):
        versions = [version for version, _ in versions_of(recorder, 0, member)]
        assert all(map(int.__ge__, versions, (0, 1, 2, 3, 3, 3)))
    assert rebuilt >= 2
    assert sum(step.metrics["sampling/kv_refreshes"] for step in steps) == rebuilt
    recorder.prove(model, kv_max_age=1)


def completions(model, run_dir, monkeypatch, seed, kills=False):
    """(group, member) -> the ids that version 0 wrote there, and how many samplers took part."""
    recorder = Recorder().watch(monkeypatch)
    trainer = make_trainer(model, run_dir, turns=1, seed=seed, groups_per_step=2, group_size=8, max_staleness=0)

    async def kill_one():
        while model._run is None or not model._run.samplers[0]._sent:
            await asyncio.sleep(0.002)
        pid = model._run.workers.samplers[0].pid
        os.kill(pid, signal.SIGSTOP)
        assert model._run.samplers[0]._sent, "nothing was with it"
        os.kill(pid, signal.SIGKILL)

    async def train():
        killing = asyncio.create_task(kill_one()) if kills else None
        async for step in trainer.run(SAME_ROWS, steps=1):
            assert step.metrics["recovery/restarts"] == int(kills)
        if killing is not None:
            await killing

    asyncio.run(asyncio.wait_for(train(), 2 * SECONDS))
    samplers = {event["sampler"] for event in events_of(run_dir, "segment")}
    written = {
        key: tuple(token for span in one.spans if span.kind == "generated" for token in span.tokens)
        for key, one in recorder.trajectories.items()
    }
    return written, samplers


def test_no_two_members_share_noise_and_the_same_seed_writes_the_same_after_a_restart_too(model, tmp_path, monkeypatch):
    first, samplers = completions(model, tmp_path / "first", monkeypatch, seed=42)
    assert samplers == {0, 1}
    assert len(first) == 16 and {len(ids) for ids in first.values()} == {72}
    assert len(set(first.values())) == 16, "two members wrote the same, of 60^72 texts"
    assert len({ids[0] for ids in first.values()}) > 4  # their first words differ already
    assert completions(model, tmp_path / "again", monkeypatch, seed=42)[0] == first
    assert completions(model, tmp_path / "killed", monkeypatch, seed=42, kills=True)[0] == first
    other, _ = completions(model, tmp_path / "other", monkeypatch, seed=43)
    assert not set(other.values()) & set(first.values())


def test_versions_count_updates_and_not_transfers(model, tmp_path, monkeypatch):
    """Batches that go in many pieces, and batches without a gradient, between which nothing new is published."""
    monkeypatch.setattr(run_blocks, "BATCH_QUEUE_BYTES", 16 << 10)
    put, pieces = Outbox.put, []

    async def counted(outbox, *parts):
        position = await put(outbox, *parts)
        pieces.append(position == IN_PIECES and sum(part.nbytes for part in parts) / outbox.largest_piece)
        return position

    monkeypatch.setattr(Outbox, "put", counted)
    rows = [{"prompt": "w1", "turns": 2, **({"reward": 0.5} if row in (1, 3) else {})} for row in range(5)]
    trainer = make_trainer(model, tmp_path / "run", groups_per_step=1, group_size=6, max_staleness=0)
    steps = rl.run(trainer, rows, steps=5)
    assert [step.model_step for step in steps] == [1, 1, 2, 2, 3]
    assert len(pieces) == 3 and min(pieces) > 4
    assert [event["version"] for event in events_of(tmp_path / "run", "published")] == [1, 2, 3]
    batches = events_of(tmp_path / "run", "batch")
    assert [(event["version"], event["updated"]) for event in batches] == [
        (0, True),
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert {(event["group"], event["version"]) for event in events_of(tmp_path / "run", "segment")} == {
        (0, 0),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    }
    assert audit(tmp_path / "run") == 0


def test_version_that_is_published_already_is_not_published_again(model, tmp_path):
    """The learner itself refuses: there is never a second, different copy of one version."""
    trainer = make_trainer(model, tmp_path / "run", groups_per_step=1, group_size=2, max_staleness=0)

    async def train():
        async for step in trainer.run(SAME_ROWS, steps=4):
            if step.n == 2:
                assert model._run.slots.committed == model._run.ledger.policy_version() == 2
                again = {"batch": 9, "from_version": 1, "slot": 0, "groups": [], "epoch": 0}
                await model._run.learner.optim_step(**again, lr=0.1, gradient_scale=1.0)

    with pytest.raises(WorkerDied, match="A step from version 1 to 2 was asked for at version 2"):
        asyncio.run(asyncio.wait_for(train(), 2 * SECONDS))
    assert [event["version"] for event in events_of(tmp_path / "run", "published")] == [1, 2]
