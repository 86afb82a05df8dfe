"""A log that a death cut off (case HR70): the torn end is cut, every whole line is kept, and lines can be appended."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RunError
from pipeline.run_dir import json_lines
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.json_lines import JsonLines, cut_torn_tail, read_lines

CASE = Path(__file__).parent.parent / "data" / "cases" / "HR70" / "torn.jsonl"

# Texts with letters of more than one byte, and with what some readers take for the end of a line.
RECORDS = [{"step": step, "text": text} for step, text in enumerate(["a", "{", "ü\u2028\u0085", "}\n{", ""] * 3)]


def test_a_torn_last_line_swallows_no_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    shutil.copy(CASE, path)
    assert cut_torn_tail(path) == len(b'{"step": 3, "ver')
    lines = JsonLines(path)
    lines.write({"step": 3, "version": 3, "loss": 0.3})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("for_people", [True, False])
def test_a_file_cut_at_any_byte_keeps_its_whole_lines(tmp_path, monkeypatch, for_people):
    monkeypatch.setattr(json_lines, "_READ_BACK", 16)
    path = tmp_path / "trajectories.jsonl"
    lines = JsonLines(path, for_people=for_people)
    for record in RECORDS:
        lines.write(record)
    lines.close()
    content = path.read_bytes()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        num_whole = len(content[:size].split(b"\n")) - 1
        num_whole += content[size : size + 1] == b"\n"  # a line that lacks nothing but its end is whole
        num_bytes = cut_torn_tail(path)
        mended = path.read_bytes()
        assert mended == b"".join(content.splitlines(keepends=True)[:num_whole])
        assert [record for _, record in read_lines(path)] == RECORDS[:num_whole]
        assert num_bytes == 0 or len(mended) == size - num_bytes
        assert cut_torn_tail(path) == 0 and path.read_bytes() == mended


def test_whole_lines_of_what_never_came_to_be_go_too(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    for tail in (b"", b"{", b'{"step": 4}'):
        path.write_bytes(b'{"step": 1}\n{"step": 3}\n{"note": 0}\n{"step": 2}\n{"step": 3}\n{"step": 3}\n' + tail)
        cut = cut_torn_tail(path, lambda record: record.get("step", 0) <= 2)
        assert (path.read_bytes(), cut) == (b'{"step": 1}\n{"step": 3}\n{"note": 0}\n{"step": 2}\n', 24 + len(tail))
    assert cut_torn_tail(path, lambda record: False) == 48 and path.read_bytes() == b""


@given(st.binary(max_size=60))
def test_whatever_stands_at_the_end_no_whole_line_is_lost(tmp_path_factory, tail):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    cut_torn_tail(path)
    assert path.read_bytes().startswith(b'{"step": 1}\n{"step": 2}\n') and path.read_bytes().endswith(b"}\n")


def test_zeros_that_a_power_failure_leaves_are_cut(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(100_000))
    assert cut_torn_tail(path) == 100_000
    path.write_bytes(bytes(100_000))
    assert cut_torn_tail(path) == 100_000 and path.read_bytes() == b""


def test_a_log_that_is_not_there_needs_no_mending(tmp_path):
    assert cut_torn_tail(tmp_path / "eval.jsonl") == 0
    assert not (tmp_path / "eval.jsonl").exists()


def test_a_log_that_cant_be_mended_is_told(tmp_path):
    with pytest.raises(RunError, match="eval.jsonl can't be mended: Is a directory"):
        (tmp_path / "eval.jsonl").mkdir()
        cut_torn_tail(tmp_path / "eval.jsonl")


def test_a_damaged_line_in_the_middle_is_named_with_its_number(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    assert cut_torn_tail(path) == 0
    with pytest.raises(RunError, match=r"Line 2 of .*events\.jsonl is damaged: b'\{\"step\" 2\}"):
        list(read_lines(path))


def test_lines_are_told_with_the_place_where_they_begin(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"b": "ü"}\n{}\n')
    assert list(read_lines(path)) == [(0, {"a": 1}), (9, {"b": "ü"}), (21, {})]


def test_the_time_of_a_resumed_run_goes_on(tmp_path):
    times = iter([100.0, 99.0, 103.5])
    log = EventLog(tmp_path / "events.jsonl", lambda: next(times), seconds=7.25)
    log.log("ready", group=0)
    log.log("ready", group=1)
    log.sync()
    assert [event["t"] for _, event in read_lines(tmp_path / "events.jsonl")] == [7.25, 10.75]
    log.close()
