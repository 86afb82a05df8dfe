"""What the log is told of an update that is taken again: what it lacks, and nothing twice."""

import asyncio
from types import SimpleNamespace

import pytest

from pipeline.errors import RunError
from pipeline.training import updates as module
from pipeline.training.updates import Counts, Updates
from workers.messages import Published


@pytest.mark.parametrize(("due", "told"), [("optim", ["optim", "published"]), ("published", ["published"]), ("", [])])
def test_the_log_is_told_what_it_lacks(due, told):
    logged, slots = [], []
    run = SimpleNamespace(
        events=SimpleNamespace(log=lambda event, **fields: logged.append(event)),
        slots=SimpleNamespace(published=lambda version, slot: slots.append((version, slot))),
    )
    updates = Updates(run, lambda: 0.0)
    updates.begin(due)
    metrics = {"train/publish_seconds": 0.5, "publish_bytes": 8.0}
    updates._note(Published(version=3, slot=1, metrics=metrics, consumed=0))
    assert (logged, slots) == (told, [(3, 1)])


def test_a_learner_that_answers_for_no_chunk_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(module, "LEARNER_SECONDS", 0.01)
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    monkeypatch.setattr(Counts, "of", lambda rows: Counts(1, 1, 1))

    async def train():
        async def forward_backward(batch, rows, *, zero_gradients):
            return asyncio.get_running_loop().create_future()

        updates = Updates(SimpleNamespace(learner=SimpleNamespace(forward_backward=forward_backward)), lambda: 0.0)
        for _ in range(3):
            await updates.submit(7, None)

    with pytest.raises(RunError, match="not answered for gradients of batch 7 for 0.01 s"):
        asyncio.run(asyncio.wait_for(train(), 10.0))
