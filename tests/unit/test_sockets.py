"""The socket directory: private, short, swept when its owner was killed, left alone while it lives."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from workers.errors import ChannelError
from workers.processes.sockets import (
    LOCK,
    MAX_SOCKET_PATH,
    OURS,
    PREFIX,
    RUN_FILES,
    SocketDirectory,
    Swept,
    sweep,
    sweep_all,
)

ROOT = Path(__file__).parent.parent.parent
OWNER = (
    "import sys, time; from workers.processes.sockets import SocketDirectory; "
    "d = SocketDirectory(); print(d.path, d.mark, flush=True)"
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

    def start(place=base):
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER + "\nsys.stdin.read()"],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": place},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        path, process.mark = process.stdout.readline().split()
        return process, path

    yield start
    for process in started:
        process.kill()
        process.communicate()


def marked_process(path):
    """Of a run that has its files there; it waits. As a program begins, the kernel shows no environment of it for a
    moment, and nobody could find the mark.
    """
    process = subprocess.Popen(["/bin/sleep", "1000"], env={RUN_FILES: path}, start_new_session=True)
    while not Path(f"/proc/{process.pid}/environ").read_bytes():
        time.sleep(0.001)
    return process


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
    assert sweep(base) == [Swept(left, 0)]
    assert sweep(base) == []


def test_sweep_leaves_what_other_users_runs_have_left(base, owner, monkeypatch):
    """Root could remove it, and end their processes."""
    killed, left = owner()
    killed.kill()
    killed.wait()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 4711)
        assert sweep(base) == [] and os.path.isdir(left)
    assert sweep(base) == [Swept(left, 0)]


def test_sweep_leaves_what_is_not_its_own(base):
    """A directory that is being made (no lock yet), a file, a link, other names, and what others have called so."""
    for name in ("headway-results", "headway-notes"):
        os.mkdir(os.path.join(base, name))
    Path(base, "headway-results", LOCK).write_text("of another program")
    os.mkdir(os.path.join(base, "headway-notes", LOCK))
    os.mkdir(os.path.join(base, "headway-new"))
    os.mkdir(os.path.join(base, "other"))
    open(os.path.join(base, "other", "lock"), "x").close()
    open(os.path.join(base, "headway-file"), "x").close()
    os.symlink(os.path.join(base, "other"), os.path.join(base, "headway-link"))
    assert sweep(base) == []
    assert sorted(os.listdir(base)) == [
        "headway-file",
        "headway-link",
        "headway-new",
        "headway-notes",
        "headway-results",
        "other",
    ]


def test_directory_whose_maker_was_killed_before_its_lock_had_a_name_is_removed_when_old(base):
    left, kept = (tempfile.mkdtemp(prefix=PREFIX, dir=base) for _ in range(2))
    for path in (left, kept):
        for name in ("lock.new", "try"):
            open(os.path.join(path, name), "x").close()
    open(os.path.join(kept, "results"), "x").close()  # no socket directory at all
    sweep(base)
    assert os.path.isdir(left)  # it may be in the making
    for path in (left, kept):
        os.utime(path, (0, 0))
    sweep(base)
    assert os.listdir(base) == [os.path.basename(kept)]
    assert sorted(os.listdir(kept)) == ["lock.new", "results", "try"]


@pytest.mark.parametrize(("name", "mode"), [("headway-results", 0o700), ("headway-results_", 0o755)])
def test_an_empty_directory_that_others_have_called_so_stays_however_old(base, name, mode):
    """One of ours has a name of just eight letters more, and a mode of its own."""
    path = os.path.join(base, name)
    os.mkdir(path)
    os.chmod(path, mode)
    os.utime(path, (0, 0))
    assert sweep(base) == [] and os.path.isdir(path)


def test_processes_of_a_killed_run_go_with_its_directory_and_those_of_others_stay(base, owner):
    killed, left = owner()
    _, lives = owner()
    paths = (left, lives, left + "0")
    others = [marked_process(path) for path in paths]
    try:
        assert sweep(base) == []
        killed.kill()
        killed.wait()
        assert sweep(base) == [Swept(left, 1)]
        assert others[0].wait(60) == -signal.SIGKILL
        assert [one.poll() for one in others[1:]] == [None, None]
    finally:
        for one in others:
            one.kill()
            one.wait()


def test_processes_of_a_killed_run_are_found_by_whatever_link_leads_to_its_directory(base, owner):
    os.mkdir(os.path.join(base, "place"))
    for link in ("one", "other"):
        os.symlink("place", os.path.join(base, link))
    killed, left = owner(os.path.join(base, "one"))
    marked = marked_process(killed.mark)
    try:
        killed.kill()
        killed.wait()
        (swept,) = sweep(os.path.join(base, "other"))
        assert swept.num_processes == 1 and not os.path.exists(left)
        assert marked.wait(60) == -signal.SIGKILL
    finally:
        marked.kill()
        marked.wait()


def test_what_is_left_of_its_processes_goes_when_a_directory_is_closed(base):
    sockets = SocketDirectory()
    left = marked_process(sockets.path)
    try:
        sockets.close()
        assert left.wait(60) == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


def test_directories_are_swept_wherever_they_may_lie(base, owner, monkeypatch):
    """The killed run had another TMPDIR than this one."""
    killed, left = owner()
    killed.kill()
    killed.wait()
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as other:
        monkeypatch.setattr(tempfile, "tempdir", other)
        monkeypatch.setenv("TMPDIR", base)
        assert Swept(left, 0) in sweep_all()


def test_an_error_says_of_each_place_why_there_is_none(base, monkeypatch):
    """Too long a name, no such place, a file, and one where nothing can be made."""
    long, nowhere, file = os.path.join(base, "x" * 60), os.path.join(base, "gone"), os.path.join(base, "file")
    os.mkdir(long)
    Path(file).write_text("")
    monkeypatch.setattr("workers.processes.sockets.places", lambda: [long, nowhere, file, "/proc"])
    with pytest.raises(ChannelError) as caught:
        SocketDirectory()
    said = str(caught.value)
    assert f"{long} has a name of {len(long)} bytes, where a socket's leaves 52; " in said
    assert (
        f"{nowhere} can't be used (No such file or directory); {file} can't be used (Not a directory); /proc " in said
    )
    assert said.endswith(" Set TMPDIR to a directory with a short name that can be written to.")


def test_a_place_without_sockets_is_passed_over(base, monkeypatch):
    """Some file systems have none: shares of other machines."""
    other = os.path.join(base, "o")
    os.mkdir(other)
    monkeypatch.setattr("workers.processes.sockets.places", lambda: [base, other])
    bind = socket.socket.bind

    def refuse(self, path):
        if os.path.dirname(os.path.dirname(path)) == base:
            raise PermissionError(1, "Operation not permitted")
        return bind(self, path)

    monkeypatch.setattr("workers.processes.sockets.socket.socket", type("Refusing", (socket.socket,), {"bind": refuse}))
    sockets = SocketDirectory()
    assert os.path.dirname(sockets.path) == other and os.listdir(base) == ["o"]
    assert os.listdir(sockets.path) == [LOCK] and Path(sockets.path, LOCK).read_bytes() == OURS
    sockets.close()
