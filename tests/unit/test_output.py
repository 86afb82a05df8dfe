"""Output that nobody can read: dropped where the terminal has been closed, and in an end that a signal has asked for;
else who prints is told.
"""

import io
import os

import pytest

from pipeline.commands import output


@pytest.fixture
def printing(monkeypatch):
    """printing(descriptor): stdout and stderr go there, through what a command puts around them."""
    monkeypatch.setattr(output, "_ends", False)

    def begin(descriptor, **options):
        for name in ("stdout", "stderr"):
            file = io.FileIO(descriptor, "wb", closefd=False)
            stream = io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="backslashreplace", **options)
            monkeypatch.setattr(f"sys.{name}", stream)
        output.outlive_terminal()
        return output.sys.stdout, output.sys.stderr

    return begin


@pytest.mark.parametrize("line_buffering", [True, False])
def test_what_goes_to_a_closed_terminal_is_dropped(printing, line_buffering):
    ours, theirs = os.openpty()
    streams = printing(theirs, line_buffering=line_buffering)
    shown = open(ours, "rb", buffering=0)
    for stream in streams:
        assert stream.isatty() and stream.fileno() == theirs and stream.line_buffering is line_buffering
        print("seen ä\udc80", file=stream, flush=True)
        assert shown.readline().decode() == "seen ä\\udc80\r\n"
    shown.close()
    for stream in streams:
        assert not stream.isatty()
        print("x" * 100_000, file=stream, flush=True)
    os.close(theirs)


def test_a_reader_that_is_gone_is_told_until_a_signal_has_come(printing):
    ours, theirs = os.pipe()
    os.close(ours)
    stdout, _ = printing(theirs)
    with pytest.raises(BrokenPipeError):
        print("unread", file=stdout, flush=True)
    output.expect_no_reader()
    print("unread", file=stdout, flush=True)
    os.close(theirs)


def test_a_disk_that_is_full_is_told_whatever_has_come(printing):
    full = os.open("/dev/full", os.O_WRONLY)
    stdout, stderr = printing(full)
    output.expect_no_reader()
    for stream in (stdout, stderr):
        with pytest.raises(OSError, match="No space left"):
            print("lost", file=stream, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full)
        stream.flush()
        os.dup2(os.open("/dev/full", os.O_WRONLY), full)
    os.close(full)


def test_what_was_closed_before_the_start_stays_away(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    output.outlive_terminal()
    assert output.sys.stdout is None and output.sys.stderr is None
