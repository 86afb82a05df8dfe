"""A learner that dies comes back to the same weights and the same optimizer, bit for bit, wherever it died."""

import asyncio
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from dying_learner import POINTS
from learner_in_process import InProcess, Recorded, Training, some_rows, spec

from pipeline.errors import RunError
from shm.ledger import State
from workers.errors import CheckpointError, WorkerDied, WorkerFailed
from workers.model_files.tensor_files import OPTIMIZER, SINGLE

SECONDS = 100.0  # bound on every run of it
# What a batch is sent in, and what is trained.
KINDS = {
    "float32": (1, {}),
    "bfloat16, in chunks": (3, {"dtype": "bfloat16"}),
    "bfloat16 with a KL reference": (1, {"dtype": "bfloat16", "kl_coefficient": 0.1}),
    "float32 with a KL reference, in chunks": (2, {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}),
}


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    """Payloads go in pieces, and a batch fills the ring several times."""
    monkeypatch.setattr("pipeline.processes.worker.run_blocks.BATCH_QUEUE_BYTES", 1024)


def batches(num_updates, num_chunks=1, skipped=()):
    """By number; a skipped one had no gradient: nothing of it reaches the learner."""
    numbers = [n for n in range(1, 1 + num_updates + len(skipped)) if n not in skipped]
    return {n: [some_rows(10 * n + chunk, version) for chunk in range(num_chunks)] for version, n in enumerate(numbers)}


def run(coroutine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # weights that differ are warned of
        warnings.filterwarnings("ignore", ".* takes its place")
        return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


async def train(made, plan=(), *, history=None, between=None, **changes):
    """(what the samplers saw, version by version; metrics of each step; the learner's state; the number of restarts)"""
    with Training(spec(**changes), InProcess(plan), history or Recorded()) as training:
        await training.learner.start(0, ())
        published, metrics = [training.weights()], []
        for n, chunks in made.items():
            metrics.append(await training.step(n, chunks))
            assert training.blocks.ledger.policy_version() == training.slots.committed == len(published)
            if between is not None:
                await between(training)
            await training.settled()
            published.append(training.weights())
        assert not training.workers.plan, f"nothing died at {training.workers.plan}"
        return published, metrics, training.state(), training.events.restarts


def assert_same(one, other):
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert torch.equal(mine, theirs)
    assert one[1] == other[1]
    assert one[2].keys() == other[2].keys()
    for name, tensor in one[2].items():
        assert torch.equal(tensor, other[2][name]), name


async def save(training, folder, version):
    folder.mkdir(exist_ok=True)
    await training.learner.client.save(version, str(folder / SINGLE), str(folder / OPTIMIZER), 10**6)
    training.history.saved[version] = folder


@pytest.mark.parametrize("kind", KINDS)
def test_wherever_it_dies_all_is_as_if_it_had_not(kind, tmp_path):
    """Once at each point of an update, then from checkpoints on; batches 2 and 6 are skipped."""
    num_chunks, options = KINDS[kind]
    made = batches(len(POINTS), num_chunks, skipped=(2, 6))
    plan = [(point, n, False) for point, n in zip(POINTS, made, strict=True)]

    async def save_some(training):
        if (version := training.slots.committed) in (4, 7):
            await save(training, tmp_path / f"version-{version}", version)

    history = Recorded()
    undisturbed = run(train(made, **options))
    disturbed = run(train(made, plan, history=history, between=save_some, **options))
    assert disturbed[3] == len(POINTS)
    assert {base for base, _ in history.asked} == {0, 4, 7}
    assert_same(disturbed, undisturbed)
    assert not any(torch.equal(one, other) for one, other in pairwise(undisturbed[0]))  # each update changed something


def test_one_that_dies_again_in_its_replay_comes_back_all_the_same():
    """At each point that a replay has: what is resident is not written again."""
    made = batches(3, num_chunks=2)
    undisturbed = run(train(made))
    points = [point for point in POINTS if not point.startswith("slot_")]
    again = [(point, batch, True) for batch in (1, 2) for point in points]
    disturbed = run(train(made, [("stepped", 3, False), *again]))
    assert disturbed[3] == 1 + len(again)
    assert_same(disturbed, undisturbed)


@pytest.mark.parametrize("num_times", [1, 2])
def test_one_that_dies_idle_is_back_before_it_is_needed(num_times):
    async def kill(training):
        for _ in range(num_times):
            training.workers.kill()
            await training.settled()

    made = batches(3)
    disturbed = run(train(made, between=kill))
    assert disturbed[3] == 3 * num_times
    assert_same(disturbed, run(train(made)))


@pytest.mark.parametrize("point", ["save_arrived", "saving"])
def test_one_that_dies_at_a_save_is_asked_again(point, tmp_path):
    """And what it had begun to write is gone."""
    made = batches(2)

    def saving_in(folder):
        async def between(training):
            if training.slots.committed == 2:
                await save(training, folder, 2)

        return between

    undisturbed = run(train(made, between=saving_in(tmp_path / "one")))
    disturbed = run(train(made, [(point, 2, False)], between=saving_in(tmp_path / "other")))
    assert disturbed[3] == 1
    assert_same(disturbed, undisturbed)
    files = {SINGLE, OPTIMIZER}
    for folder in ("one", "other"):
        assert {file.name for file in (tmp_path / folder).iterdir()} == files
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_save_that_fails_leaves_nothing_and_the_learner_goes_on(tmp_path):
    async def between(training):
        with pytest.raises(CheckpointError, match="absent"):
            await training.learner.client.save(1, str(tmp_path / SINGLE), str(tmp_path / "absent" / OPTIMIZER), 10**6)
        with pytest.raises(CheckpointError, match="at version 1, so version 0 isn't saved"):
            await training.learner.client.save(0, str(tmp_path / SINGLE), str(tmp_path / OPTIMIZER), 10**6)

    run(train(batches(1), between=between))
    assert list(tmp_path.iterdir()) == []


# --- what ends the run instead ---------------------------------------------------------------------------------------


async def fail(plan, made, history=True):
    """The failure of a run that dies by `plan`; whoever waits for its update is told of it."""
    with Training(spec(), InProcess(plan), Recorded() if history else None) as training:
        await training.learner.start(0, ())
        training.workers.max_restarts = 5
        with pytest.raises(Exception) as told:
            for n, chunks in made.items():
                await training.step(n, chunks)
        assert told.value is training.failure and training.learner.client.is_lost
        return training.failure


def test_deaths_without_end_are_no_accidents():
    failure = run(fail([("stepped", 2, False)] * 7, batches(2)))
    assert isinstance(failure, RunError)
    assert "Learners died 6 times within ten minutes, but max_restarts is 5" in str(failure)


def test_without_a_history_a_death_is_the_end():
    failure = run(fail([("in_forward", 2, False)], batches(2), history=False))
    assert isinstance(failure, WorkerDied) and "killed" in str(failure)


def test_one_that_broke_a_rule_is_not_started_again():
    old = batches(4) | {4: [some_rows(1, version=0)]}
    failure = run(fail([], old))
    assert isinstance(failure, WorkerFailed) and "is 3 updates old" in str(failure)


def test_ages_are_checked_in_replay_too():
    async def forge():
        with Training(spec(), InProcess(), Recorded()) as training:
            await training.learner.start(0, ())
            for n, chunks in batches(4).items():
                await training.step(n, chunks)
            training.history.past[3] = replace(training.history.past[3], chunks=[some_rows(1, version=0)])
            training.workers.kill()
            await training.settled()
            return training.failure

    failure = run(forge())
    assert isinstance(failure, WorkerFailed) and "is 3 updates old" in str(failure)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_history_with_a_gap_is_told(lost):
    async def lose():
        with Training(spec(), InProcess(), Recorded()) as training:
            await training.learner.start(0, ())
            for n, chunks in batches(3).items():
                await training.step(n, chunks)
            del training.history.past[lost]
            training.workers.kill()
            await training.settled()
            return training.failure

    with_words = f"from version {lost} on the way to 3 is due" if lost < 2 else "ends at version 2"
    assert with_words in str(run(lose()))


def test_a_run_that_fails_while_the_learner_comes_back_is_not_kept_waiting():
    class Failing(Recorded):
        """Read for a replay, at its first update."""

        def updates(self, after, to):
            if to > 0:
                training.fail(RunError("Something else."))
            return super().updates(after, to)

    async def fail_meanwhile():
        nonlocal training
        with Training(spec(), InProcess([("stepped", 2, False)]), Failing()) as training:
            await training.learner.start(0, ())
            with pytest.raises(RunError, match=r"Something else\."):
                for n, chunks in batches(2).items():
                    await training.step(n, chunks)
            await training.settled()
            assert training.learner.client.is_lost and training.slots.committed == 1
            return await training.learner.client.settle()

    training = None
    with pytest.raises(RunError, match=r"Something else\."):  # the update is in doubt for good
        run(fail_meanwhile())


def test_weights_that_come_back_different_are_told():
    async def differ(training):
        if training.slots.committed == 2:
            training.history.past[0] = replace(training.history.past[0], lr=0.5)
            training.workers.kill()
            await training.settled()

    with pytest.warns(UserWarning, match=r"brought back to version 2, but its weights are up to .* away"):
        asyncio.run(train(batches(2), between=differ))


# --- slots -----------------------------------------------------------------------------------------------------------


def test_versions_that_somebody_holds_are_made_again_where_slots_die_with_the_learner():
    """As on a GPU: whatever they held is gone, and with it the samplers' mappings."""

    async def lose_slots():
        with Training(spec(num_slots=4), InProcess(), Recorded()) as training:
            training.blocks.slots_outlive_learner = False
            await training.learner.start(0, ())
            weights = {}
            for n, chunks in batches(3).items():
                weights[n - 1] = training.weights()
                if n == 2:
                    training.slots.lease(1)
                await training.step(n, chunks)
            weights[3] = training.weights()
            slots = {version: training.slots.slot_of(version) for version in (0, 1, 2, 3)}
            for slot in slots.values():
                training.blocks.ledger.write_slot(slot, -1, State.EMPTY)
                training.workers.worker._slots.flat(slot).fill_(torch.nan)
            training.workers.kill()
            assert training.slot_events == ["lost"] and sorted(training.slots.resident) == [1, 3]
            await training.settled()
            assert training.slot_events == ["lost", "made"] and training.history.asked[-1] == (0, 3)
            for version in (1, 3):
                assert torch.equal(training.workers.worker._slots.flat(slots[version]), weights[version])
                found = training.blocks.ledger.slot(slots[version])
                assert (found.version, found.state) == (version, State.READY) and found.checksum
            assert training.workers.worker._slots.flat(slots[0]).isnan().all()
            assert training.blocks.ledger.policy_version() == 3

    run(lose_slots())


def test_a_run_opens_at_a_later_version_with_older_ones_resident(tmp_path):
    """As a resumed one does, from a checkpoint before all of them."""
    made = batches(5)
    seen = {}

    async def first(training):
        version = training.slots.committed
        seen[version] = training.weights()
        if version == 2:
            await save(training, tmp_path / "version-2", 2)

    history = Recorded()
    state = run(train(made, history=history, between=first))[2]

    async def resume():
        with Training(spec(), InProcess(), history) as training:
            await training.learner.start(5, (4, 3))
            assert history.asked == [(0, 0), (2, 5)]
            assert sorted(training.slots.resident) == [3, 4, 5] and training.slots.committed == 5
            for version in (3, 4, 5):
                assert torch.equal(training.workers.worker._slots.flat(training.slots.slot_of(version)), seen[version])
            assert training.blocks.ledger.policy_version() == 5
            for name, tensor in training.state().items():
                assert torch.equal(tensor, state[name]), name
            await training.step(6, [some_rows(60, version=5)])
            assert training.slots.committed == 6

    run(resume())


@pytest.mark.parametrize("republish", [(0, 1, 2, 3), (6,)])
def test_a_run_that_would_need_more_slots_or_newer_versions_is_not_opened(republish):
    async def resume():
        with Training(spec(num_slots=4), InProcess(), Recorded()) as training:
            await training.learner.start(5, republish)

    with pytest.raises(RunError, match="to be resident at version 5, in 4 slots"):
        run(resume())
