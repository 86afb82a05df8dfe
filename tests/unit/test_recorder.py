"""The order in which a decision is written: what led to it, its record (of a batch, to the disk), then its event."""

from types import SimpleNamespace

import pytest

from pipeline.errors import RunError
from pipeline.journal.recorder import Recorder
from pipeline.journal.records import BatchRecord
from pipeline.schedule import Admission
from pipeline.trajectory import Group, Trajectory


@pytest.fixture
def written():
    return []


@pytest.fixture
def recorder(written):
    """Which has admitted group 0; what it does from now on is written down."""
    journal = SimpleNamespace(
        append=lambda record: written.append(type(record).__name__),
        sync=lambda: written.append("journal on disk"),
        begin=lambda: written.append("next file") or 7,
    )
    events = SimpleNamespace(
        log=lambda event, **fields: written.append(event),
        flush=lambda: written.append("log written"),
        sync=lambda: written.append("log on disk"),
    )
    recorder = Recorder(journal, events)
    recorder.admitted(Admission(0, 0, 0), None)
    written.clear()
    return recorder


def ready(*members, final=True):
    return Group(0, 0, 0, [Trajectory(0, member, 0) for member in members], final=final)


def test_an_admission(recorder, written):
    recorder.admitted(Admission(1, 1, 0), "its-id")
    assert written == ["log written", "Admitted", "admitted"]


def test_a_part_without_members_has_no_event(recorder, written):
    recorder.ready(ready(0, final=False))
    recorder.ready(ready())
    assert written == ["log written", "Ready", "ready", "log written", "Ready"]


def test_a_group_that_is_given_up(recorder, written):
    recorder.given_up("filtered", 0, "zero_variance", 3, was_ready=True)
    assert written == ["log written", "GivenUp", "ready", "filtered"]


def test_a_batch_is_on_disk_before_anybody_hears_of_it(recorder, written):
    recorder.ready(ready(0))
    written.clear()
    recorder.batch(BatchRecord(1, 0, (0,), None, True, 0.1, 1.0, (), 5, 0, 0, 0, 0))
    assert written == ["log written", "BatchRecord", "journal on disk", "batch"]
    assert recorder.state.training is not None


def test_a_batch_whose_record_the_disk_may_not_have_counts_all_the_same(recorder, written):
    """Its record is with the system: a resumed run would find it, and what tells how this one ended counts it."""
    recorder.ready(ready(0))
    written.clear()

    def fail():
        raise RunError("The disk does not answer.")

    recorder._journal.sync = fail
    with pytest.raises(RunError):
        recorder.batch(BatchRecord(1, 0, (0,), None, True, 0.1, 1.0, (), 5, 0, 0, 0, 0))
    assert written == ["log written", "BatchRecord", "batch"]


def test_the_log_is_on_disk_before_files_of_the_journal_may_go(recorder, written):
    assert recorder.next_file() == 7
    assert written == ["log on disk", "next file"]
