"""The socket directory: private, short, swept when its owner was killed, left alone while it lives."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workers.sockets import MAX_SOCKET_PATH, SocketDirectory, sweep

ROOT = Path(__file__).parent.parent.parent
OWNER = (
    "import sys, time; from workers.sockets import SocketDirectory; d = SocketDirectory(); print(d.path, flush=True)"
)


@pytest.fixture
def base(monkeypatch):
    """An empty directory for temporary files, with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield path


@pytest.fixture
def owner(base):
    """owner(): another process that made its directory here and waits; returns (process, the directory)."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER + "\nsys.stdin.read()"],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": base},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_directory_is_private_short_and_gone_after_close(base):
    sockets = SocketDirectory()
    assert os.path.dirname(sockets.path) == base
    assert stat.S_IMODE(os.stat(sockets.path).st_mode) == 0o700
    endpoint = sockets.endpoint("environment-15.1000")
    assert endpoint == f"ipc://{sockets.path}/environment-15.1000"
    assert len(endpoint.removeprefix("ipc://")) <= MAX_SOCKET_PATH
    open(os.path.join(sockets.path, "environment-15.1000"), "x").close()
    sockets.close()
    sockets.close()
    assert os.listdir(base) == []


def test_two_directories_of_one_process_are_apart(base):
    first, second = SocketDirectory(), SocketDirectory()
    assert first.path != second.path and len(os.listdir(base)) == 2
    first.close()
    assert os.path.isdir(second.path)
    second.close()


def test_temporary_directory_with_a_long_name_is_not_used(base, monkeypatch):
    long = os.path.join(base, "x" * 60)
    os.mkdir(long)
    monkeypatch.setattr(tempfile, "tempdir", long)
    sockets = SocketDirectory()
    try:
        assert os.path.dirname(sockets.path) == "/tmp" and os.listdir(long) == []
    finally:
        sockets.close()


def test_next_start_removes_what_a_killed_process_left_and_nothing_of_the_living(base, owner):
    killed, left = owner()
    _, lives = owner()
    open(os.path.join(left, "sampler-0.0"), "x").close()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert os.path.isdir(left)
    sockets = SocketDirectory()
    assert sorted(os.listdir(base)) == sorted(os.path.basename(path) for path in (lives, sockets.path))
    assert os.listdir(lives) == ["lock"]
    sockets.close()


def test_sweep_names_what_it_removed(base, owner):
    killed, left = owner()
    assert sweep(base) == []
    killed.kill()
    killed.wait()
    assert sweep(base) == [left]
    assert sweep(base) == []


def test_sweep_leaves_what_is_not_its_own(base):
    """A directory that is being made (no lock yet), a file, a link, and other names."""
    os.mkdir(os.path.join(base, "headway-new"))
    os.mkdir(os.path.join(base, "other"))
    open(os.path.join(base, "other", "lock"), "x").close()
    open(os.path.join(base, "headway-file"), "x").close()
    os.symlink(os.path.join(base, "other"), os.path.join(base, "headway-link"))
    assert sweep(base) == []
    assert sorted(os.listdir(base)) == ["headway-file", "headway-link", "headway-new", "other"]


def test_directory_whose_maker_was_killed_before_its_lock_had_a_name_is_removed_when_old(base):
    left, kept = os.path.join(base, "headway-left"), os.path.join(base, "headway-kept")
    for path in (left, kept):
        os.mkdir(path)
        open(os.path.join(path, "lock.new"), "x").close()
    open(os.path.join(kept, "results"), "x").close()  # no socket directory at all
    sweep(base)
    assert os.path.isdir(left)  # it may be in the making
    for path in (left, kept):
        os.utime(path, (0, 0))
    sweep(base)
    assert os.listdir(base) == ["headway-kept"] and sorted(os.listdir(kept)) == ["lock.new", "results"]
