"""A bookmark in the audit log saves reading what is before it, and one that does not hold is passed over."""

import itertools

import pytest
from simulated_run import Died, SimulatedRun

from pipeline.errors import RunError
from pipeline.journal.complete_log import complete_log
from pipeline.journal.log_bookmark import TAIL_BYTES, LogBookmark, read_bookmark
from pipeline.journal.log_state import LogState
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.run_files import BOOKMARK, EVENTS
from pipeline.user_warnings import RunWarning

TO_THE_END = 10**9


@pytest.fixture
def opened(tmp_path):
    """(log, bookmark) of a run whose journal's directory is there."""
    (tmp_path / BOOKMARK).parent.mkdir()
    log = EventLog(tmp_path / EVENTS, itertools.count(0.0, 0.001).__next__)
    yield log, LogBookmark(tmp_path, log, LogState())
    log.close()


def play(log, groups):
    """Each with a member under way."""
    for group in groups:
        log.log("admitted", group=group, row=group, version=0)
        log.log("started", group=group, trajectory=f"{group}.0", version=None, sampler=0)


def test_what_the_bookmark_says_is_what_the_log_said(tmp_path, opened):
    log, bookmark = opened
    play(log, range(100))
    bookmark.save()
    size = (tmp_path / EVENTS).stat().st_size
    play(log, range(100, 103))
    log.flush()
    end, state = read_bookmark(tmp_path, TO_THE_END)
    assert (end, state.admitted, sorted(state.groups)) == (size, 100, list(range(100)))
    assert state.groups[99].members[0].state == "running"
    bookmark.save()
    end, state = read_bookmark(tmp_path, TO_THE_END)
    assert (end, state.admitted) == ((tmp_path / EVENTS).stat().st_size, 103)


def spoil_format(path):
    path.write_bytes(path.read_bytes().replace(b"\x93\x01", b"\x93\x02", 1))


def spoil_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_log(path):
    log = path.parent.parent / EVENTS
    log.write_bytes(log.read_bytes()[:-1])


def change_log(path):
    """Another run's log, of the same length."""
    log = path.parent.parent / EVENTS
    log.write_bytes(log.read_bytes().replace(b'"sampler": 0', b'"sampler": 1'))


@pytest.mark.parametrize(
    "spoil", [spoil_format, spoil_byte, cut_log, change_log, lambda path: path.unlink(), lambda p: p.write_bytes(b"")]
)
def test_bookmark_that_does_not_hold_is_passed_over(tmp_path, opened, spoil):
    log, bookmark = opened
    play(log, range(3))
    bookmark.save()
    assert read_bookmark(tmp_path, TO_THE_END)[0] > 0
    spoil(tmp_path / BOOKMARK)
    assert read_bookmark(tmp_path, TO_THE_END) == (0, LogState())


def test_bookmark_beyond_what_the_journal_knows_is_passed_over(tmp_path, opened):
    """The log is going to be cut off before it."""
    log, bookmark = opened
    play(log, range(3))
    bookmark.save()
    assert read_bookmark(tmp_path, 3)[0] > 0
    assert read_bookmark(tmp_path, 2) == (0, LogState())


def test_bookmark_that_can_not_be_written_costs_a_warning_and_no_more(tmp_path, opened):
    log, bookmark = opened
    play(log, range(3))
    (tmp_path / BOOKMARK).parent.rmdir()
    with pytest.warns(RunWarning, match=r"log\.msgpack can't be written \(No such file or directory\)") as warned:
        bookmark.save()
        bookmark.save()
    assert len(warned) == 1
    (tmp_path / BOOKMARK).parent.mkdir()
    bookmark.save()
    assert [path.name for path in (tmp_path / BOOKMARK).parent.iterdir()] == ["log.msgpack"]


def test_event_that_waits_for_room_on_the_disk_is_in_the_bookmark_once_it_is_written(tmp_path, opened, monkeypatch):
    log, bookmark = opened
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(RunError, match="No space left on device"):
            log.log("admitted", group=0, row=0, version=0, id="x" * (1 << 16))
    bookmark.save()
    end, state = read_bookmark(tmp_path, TO_THE_END)
    assert (end, state.num_decisions, list(state.groups)) == ((tmp_path / EVENTS).stat().st_size, 1, [0])


def test_a_resume_reads_from_the_bookmark_on(tmp_path):
    """Damage before it is nothing that a resume must know of, and shows what was not read."""
    run = SimulatedRun(tmp_path, seed=9, mode="wait")
    with pytest.raises(Died):
        run._live(150)
    run.files.flush()
    run.bookmark.save()
    whole = complete_log(tmp_path, 0)
    log = tmp_path / EVENTS
    data = log.read_bytes()
    spoiled = len(data) - TAIL_BYTES
    assert spoiled > 1000
    log.write_bytes(b"?" * spoiled + data[spoiled:])
    assert complete_log(tmp_path, 0) == whole
