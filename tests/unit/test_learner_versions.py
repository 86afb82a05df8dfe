"""What a learner that comes back lets others see of its version and slots, and what none is asked any more."""

import asyncio

import pytest
import torch
from learner_in_process import InProcess, Recorded, Training, some_rows, spec

from pipeline.errors import RunError
from shm.ledger import State
from workers.messages import OptimStep
from workers.model_files.tensor_files import OPTIMIZER, SINGLE

SECONDS = 20.0  # bound on every run


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    """Two batches don't fit in it."""
    monkeypatch.setattr("pipeline.processes.worker.run_blocks.BATCH_QUEUE_BYTES", 1024)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


async def train(training, num_updates):
    await training.learner.start(0, ())
    for version in range(num_updates):
        await training.step(version + 1, [some_rows(version + 1, version)])


def watch(training):
    """The ledger's policy version at each point of each replay from now on."""
    seen = []

    def reach(point, batch, replays):
        if replays:
            seen.append(training.blocks.ledger.policy_version())

    training.workers.reach = reach
    return seen


def test_policy_version_never_goes_back_while_a_new_learner_comes_to_it():
    """Samplers and environments go on meanwhile, and count with it."""

    async def come_back():
        with Training(spec(), InProcess(), Recorded()) as training:
            await train(training, 3)
            seen = watch(training)
            training.workers.kill()
            await training.settled()
            assert len(seen) > 10 and set(seen) == {3}

    run(come_back())


def test_policy_version_of_a_resumed_run_is_written_when_its_replay_is_done():
    async def resume():
        history = Recorded()
        with Training(spec(), InProcess(), history) as training:
            await train(training, 3)
        with Training(spec(), InProcess(), history) as training:
            seen, before = watch(training), training.blocks.ledger.policy_version()
            await training.learner.start(3, ())
            assert training.blocks.ledger.policy_version() == 3 != before
            *until_then, at_the_answer, after_it = seen
            assert len(until_then) > 10 and set(until_then) == {before}
            assert at_the_answer == after_it == 3

    run(resume())


@pytest.mark.parametrize("outlive", [False, True])
def test_replay_begins_where_a_lost_slot_needs_it_and_no_earlier(outlive, tmp_path):
    """Version 1 is leased. A checkpoint of version 2 is enough for a learner, but not where slots died with it."""

    async def come_back():
        with Training(spec(), InProcess(), Recorded()) as training:
            training.blocks.slots_outlive_learner = outlive
            await train(training, 1)
            training.slots.lease(1)
            weights = training.weights()
            await training.step(2, [some_rows(2, version=1)])
            await training.learner.client.save(2, str(tmp_path / SINGLE), str(tmp_path / OPTIMIZER), 10**6)
            training.history.saved[2] = tmp_path
            await training.step(3, [some_rows(3, version=2)])
            leased = training.slots.slot_of(1)
            if not outlive:
                training.blocks.ledger.write_slot(leased, -1, State.EMPTY)
                training.workers.worker._slots.flat(leased).fill_(torch.nan)
            training.workers.kill()
            await training.settled()
            assert training.history.asked[-1] == ((2, 3) if outlive else (0, 3))
            assert torch.equal(training.workers.worker._slots.flat(leased), weights)

    run(come_back())


@pytest.mark.parametrize("outlive", [False, True])
def test_learner_that_dies_before_its_answer_is_noted_comes_back_to_what_it_answered(outlive):
    """Version 2 is published; the trainer has not yet come to tell the slots."""

    async def come_back():
        with Training(spec(), InProcess(), Recorded()) as training:
            training.blocks.slots_outlive_learner = outlive
            await train(training, 1)
            published, _ = await training.publish(2, [some_rows(2, version=1)])
            weights = training.workers.worker._slots.flat(published.slot).clone()
            if not outlive:
                training.blocks.ledger.write_slot(published.slot, -1, State.EMPTY)
                training.workers.worker._slots.flat(published.slot).fill_(torch.nan)
            training.workers.kill()
            await training.settled()
            assert (training.failure, training.slots.committed) == (None, 1)
            assert training.blocks.ledger.policy_version() == 2
            training.slots.published(published.version, published.slot)
            assert torch.equal(training.weights(), weights)
            await training.step(3, [some_rows(3, version=2)])
            assert training.slots.committed == 3

    run(come_back())


@pytest.mark.parametrize("is_away", [False, True])
def test_step_that_a_failing_run_has_not_sent_is_sent_no_more_and_waited_for_no_more(is_away):
    """Its gradients are not whole: the learner has read nothing yet, or there is none just now."""
    told = []

    async def fail():
        with Training(spec(), InProcess(), Recorded()) as training:
            training.workers.send = told.append  # it reads nothing
            await training.learner.start(0, ())
            client = training.learner.client
            if is_away:
                client.disconnect(RunError("It was killed."))
            chunks = [
                asyncio.create_task(client.forward_backward(1, some_rows(n, 0), zero_gradients=n == 0))
                for n in range(2)
            ]
            step = {"groups": [], "epoch": 0, "lr": 0.1, "gradient_scale": 1.0}
            update = asyncio.create_task(client.optim_step(1, from_version=0, slot=1, **step))
            await asyncio.sleep(0.01)
            assert not update.done()
            training.learner.fail(RunError("Something else."))
            with pytest.raises(RunError, match=r"Something else\."):
                await update
            assert await client.settle() is None
            await asyncio.wait(chunks)

    run(fail())
    assert bool(told) == (not is_away)
    assert not any(isinstance(message, OptimStep) for message in told)
