"""The audit log holds whole lines, the exact fields of each event, and a time that never goes back."""

import errno
import json
import os

import pytest

from pipeline.errors import RunError
from pipeline.run_dir.events import FIELDS, EventLog
from pipeline.run_dir.json_lines import JsonLines


def read(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_time_starts_at_zero_and_never_goes_back(tmp_path):
    times = iter([100.0, 100.5, 100.25, 101.1234567])
    log = EventLog(tmp_path / "events.jsonl", lambda: next(times))
    for group in range(3):
        log.log("ready", group=group)
    log.close()
    assert read(tmp_path / "events.jsonl") == [
        {"t": 0.5, "event": "ready", "group": 0},
        {"t": 0.5, "event": "ready", "group": 1},
        {"t": 1.123457, "event": "ready", "group": 2},
    ]


def test_flush_makes_events_visible(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", lambda: 0.0)
    log.log("optim", **{"from": 0, "to": 1}, step=1, seconds=0.5)
    log.flush()
    assert read(tmp_path / "events.jsonl")[0]["from"] == 0
    log.close()
    log.close()


def test_events_reach_the_disk_within_a_second_of_others(tmp_path):
    now = [0.0]
    log = EventLog(tmp_path / "events.jsonl", lambda: now[0])
    written = []
    for now[0] in (0.5, 0.9, 1.0, 1.9, 2.1):
        log.log("ready", group=len(written))
        written.append(len(read(tmp_path / "events.jsonl")))
    log.close()
    assert written == [0, 0, 3, 3, 5]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", lambda: 0.0)
    log.log("restart", worker="a\u2028b\u0085c\nd", pid=1, cause="")
    log.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1
    assert read(tmp_path / "events.jsonl")[0]["worker"] == "a\u2028b\u0085c\nd"


@pytest.mark.parametrize("fields", [{}, {"group": 1, "row": 2}, {"group": 1, "row": 2, "version": 0, "more": 1}])
def test_an_event_must_have_exactly_its_fields(tmp_path, fields):
    log = EventLog(tmp_path / "events.jsonl", lambda: 0.0)
    with pytest.raises(AssertionError, match="admitted"):
        log.log("admitted", **fields)
    log.close()


def test_optional_fields_are_allowed(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", lambda: 0.0)
    log.log("run", **dict.fromkeys(FIELDS["run"].split(), 0), resumed=1)
    log.close()
    assert read(tmp_path / "events.jsonl")[0]["resumed"] == 1


def test_a_number_that_is_not_finite_is_refused(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match="metrics.jsonl"):
        lines.write({"train/loss": float("nan")})
    lines.close()
    with pytest.raises(RunError, match="closed"):
        lines.write({})


def test_a_full_disk_is_told_in_one_sentence():
    lines = JsonLines("/dev/full")
    lines.write({"a": 1})
    with pytest.raises(
        RunError, match=r"/dev/full can't be written: No space left on device \([\d,]+ bytes.* are free\);"
    ):
        lines.flush()
    with pytest.raises(RunError, match="/dev/full could not be written"):
        lines.close()


def test_what_a_full_disk_did_not_take_is_written_before_what_follows(tmp_path, monkeypatch):
    """Else the log would lack events between others, and no run could be resumed from it."""
    path, room, write = tmp_path / "events.jsonl", 100, os.write
    lines = JsonLines(path)

    def write_while_there_is_room(file, data):
        nonlocal room
        if file != lines._file:
            return write(file, data)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, bytes(data[:room]))
        room -= written
        return written

    monkeypatch.setattr(os, "write", write_while_there_is_room)
    refused = 0
    for number in range(60):
        try:
            lines.write({"number": number, "text": "x" * 4000})  # more than is held back in all
        except RunError:
            refused += 1
        room += 1_000_000 if number == 50 else 0
    assert refused > 10 and path.stat().st_size > 100
    lines.close()
    assert [line["number"] for line in read(path)] == list(range(60))


def test_a_log_that_cannot_be_opened_is_told_in_one_sentence(tmp_path):
    with pytest.raises(RunError, match=r"events\.jsonl can't be opened: Is a directory; see to that place\."):
        (tmp_path / "events.jsonl").mkdir()
        JsonLines(tmp_path / "events.jsonl")
