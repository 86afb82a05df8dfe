"""A run that is to end waits for no learner that is gone, and for one that is there as always."""

import asyncio
import warnings

import pytest
from learner_in_process import InProcess, Recorded, Training, some_rows, spec

from pipeline.errors import RunError
from workers.errors import WorkerDied
from workers.model_files.tensor_files import OPTIMIZER, SINGLE

SECONDS = 100.0  # bound on every run of it


def run(coroutine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* takes its place")
        return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


@pytest.mark.parametrize("is_away", [True, False], ids=["is brought back", "dies then"])
def test_a_run_that_is_to_end_waits_for_no_learner_that_is_gone(is_away):
    """Neither its update nor its save; the history has the update."""
    over = RunError("The run is over.")

    async def end():
        with Training(spec(), InProcess([("stepped", 2, False)]), Recorded()) as training:
            learner, client = training.learner, training.learner.client
            await learner.start(0, ())
            await training.step(1, [some_rows(1, 0)])
            training.workers.respawn = lambda handle: None
            training.workers.start = lambda *_: asyncio.get_running_loop().create_future()  # it takes long
            if not is_away:
                learner.end_soon(over)
            update = asyncio.create_task(training.step(2, [some_rows(2, 1)]))
            while not client.is_away:
                await asyncio.sleep(0)
            waits = [update, client.settle()]
            if is_away:
                waits.append(asyncio.create_task(client.save(1, "", "", 0)))
                await asyncio.sleep(0.01)
                assert not update.done()
                learner.end_soon(over)
            for waiting in waits:
                with pytest.raises(RunError, match=r"The run is over\."):
                    await waiting
            assert client.is_lost and training.failure is None and training.events.restarts == is_away
            assert len(training.history.past) == 2
            for task in training.tasks:
                task.cancel()

    run(end())


def test_one_that_ends_as_it_is_brought_back_to_a_run_that_is_to_end_has_no_successor():
    """It was ended before its start was awaited."""
    over, found = RunError("The run is over."), asyncio.Event()

    async def start(*_):
        await found.wait()
        raise WorkerDied("The learner 0 is not running.")

    async def end():
        with Training(spec(), InProcess([("stepped", 1, False)]), Recorded()) as training:
            learner = training.learner
            await learner.start(0, ())
            training.workers.respawn = lambda handle: None
            training.workers.start = start
            update = asyncio.create_task(training.step(1, [some_rows(1, 0)]))
            while not learner.client.is_away:
                await asyncio.sleep(0)
            learner.end_soon(over)
            found.set()
            await asyncio.gather(*training.tasks)
            with pytest.raises(RunError, match=r"The run is over\."):
                await update
            assert training.events.restarts == 1 and training.failure is None

    run(end())


def test_a_learner_that_is_there_goes_on_though_the_run_is_to_end(tmp_path):
    async def end():
        with Training(spec(), InProcess(), Recorded()) as training:
            await training.learner.start(0, ())
            training.learner.end_soon(RunError("The run is over."))
            await training.step(1, [some_rows(1, 0)])
            await training.learner.client.save(1, str(tmp_path / SINGLE), str(tmp_path / OPTIMIZER), 10**6)
            assert training.slots.committed == 1 and not training.learner.client.is_lost

    run(end())
