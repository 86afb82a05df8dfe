"""A run directory belongs to one run at a time, until that ends or dies."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time

import pytest

from pipeline.errors import ConfigError
from pipeline.run_dir import run_lock
from pipeline.run_dir.run_lock import RunLock, owner
from pipeline.user_warnings import RunWarning


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(run_lock, "LOOK_SECONDS", 0.05)


def live(run_dir):
    return json.loads((run_dir / "live.json").read_bytes())


def test_a_second_run_is_refused_while_the_first_goes_on(tmp_path):
    with RunLock(tmp_path) as lock:
        assert live(tmp_path)["pid"] == os.getpid() == owner(tmp_path)
        with pytest.raises(ConfigError, match=rf"belongs to a run that goes on \(process {os.getpid()}\)"):
            RunLock(tmp_path)
        lock.tell(ledger="/proc/1/fd/3", bytes=4096)
        lock.tell(bytes=8)
        assert live(tmp_path).items() >= {"pid": os.getpid(), "ledger": "/proc/1/fd/3", "bytes": 8}.items()
    assert os.listdir(tmp_path) == [] and owner(tmp_path) is None
    lock.close()
    with RunLock(tmp_path):
        assert "ledger" not in live(tmp_path)


def test_text_that_gets_shorter_leaves_nothing_behind(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.tell(text="x" * 100)
        lock.tell(text="")
        assert live(tmp_path)["text"] == ""


def hold(run_dir, pipe):
    with RunLock(run_dir):
        pipe.send("held")
        time.sleep(60)


def test_any_death_lets_go(tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() == "held"
    with pytest.raises(ConfigError, match=rf"process {process.pid}"):
        RunLock(tmp_path)
    assert owner(tmp_path) == process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert live(tmp_path)["pid"] == process.pid and owner(tmp_path) is None
    with RunLock(tmp_path):
        assert owner(tmp_path) == os.getpid()


def try_to_own(run_dir, start, pipe):
    start.wait()
    try:
        lock = RunLock(run_dir)
    except ConfigError:
        pipe.send(False)
    else:
        pipe.send(True)
        pipe.recv()
        lock.close()


def test_of_many_at_once_one_gets_it(tmp_path):
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        start, pipes, processes = context.Event(), [], []
        for _ in range(4):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=try_to_own, args=(tmp_path, start, theirs)))
            pipes.append(ours)
        for process in processes:
            process.start()
        start.set()
        results = [pipe.recv() for pipe in pipes]
        assert results.count(True) == 1
        pipes[results.index(True)].send("done")
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert os.listdir(tmp_path) == []


def test_a_file_that_went_between_opening_and_locking_is_no_lock(tmp_path, monkeypatch):
    """Its owner removes it as it ends, just before the one that has opened it locks it."""
    flock, others = fcntl.flock, []

    def late(file, how):
        if not others:
            (tmp_path / "live.json").unlink()
            others.append(file)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunLock(tmp_path):
        assert live(tmp_path)["pid"] == os.getpid() == owner(tmp_path)


def test_someone_who_looks_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    (tmp_path / "live.json").write_text("{}")
    looking = os.open(tmp_path / "live.json", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    slept = []

    def done(seconds):
        slept.append(seconds)
        os.close(looking)

    monkeypatch.setattr(time, "sleep", done)
    with RunLock(tmp_path):
        assert len(slept) == 1


def test_two_who_look_take_each_other_for_no_run(tmp_path):
    (tmp_path / "live.json").write_text('{"pid": 1}')
    with open(tmp_path / "live.json", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert owner(tmp_path) is None


def test_a_disk_that_is_full_is_told_and_keeps_nothing_locked(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        with pytest.raises(ConfigError, match="live.json can't be written: No space left on device"):
            RunLock(tmp_path)
    assert os.listdir(tmp_path) == [] and os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("contents", ["", "{", "[]", '{"pid": "me"}', "[" * 10_000])
def test_a_file_that_says_nothing_is_still_locked(tmp_path, contents):
    with RunLock(tmp_path):
        (tmp_path / "live.json").write_text(contents)
        with pytest.raises(ConfigError, match="belongs to a run that goes on; stop"):
            RunLock(tmp_path)


def test_a_link_is_no_lock(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "live.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="live.json can't be made: Too many levels of symbolic links"):
        RunLock(tmp_path)
    assert owner(tmp_path) is None and (tmp_path / "elsewhere").read_text() == "precious"


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RunWarning, match="can't be locked on this file system"), RunLock(tmp_path):
        assert live(tmp_path)["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_gone_is_told(tmp_path):
    with pytest.raises(ConfigError, match="live.json can't be made: No such file or directory"):
        RunLock(tmp_path / "absent")


def test_a_lock_whose_file_someone_replaced_removes_nothing(tmp_path):
    lock = RunLock(tmp_path)
    (tmp_path / "live.json").unlink()
    (tmp_path / "live.json").write_text("another's")
    lock.close()
    assert (tmp_path / "live.json").read_text() == "another's"
