"""What the log is told of an update that is taken again: what it lacks, and nothing twice."""

from types import SimpleNamespace

import pytest

from pipeline.training.updates import Updates
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
