"""A save that a kill, or a failing disk, cuts short at any of its calls: each is tried, in a forked process."""

import errno
import itertools
import os
import sys
from functools import partial

from tests.fake_learner import entries, open_checkpoints, save, versions
from workers.errors import CheckpointError

FILE_CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def count_file_calls(run_dir, act, stop_at=None, stop=None):
    """How often `act` asks the system for anything in the run directory; `stop` is called in place of one call."""
    calls = itertools.count(1)
    fsync = os.fsync
    watching = True

    def hook(event, arguments):
        if watching and event in FILE_CALLS:
            place = str(arguments[0])  # relative in rmtree, which goes from descriptor to descriptor
            if place.startswith(str(run_dir)) or not place.startswith("/"):
                one_more()

    def one_more():
        if next(calls) == stop_at:
            stop()

    def counted(descriptor):
        one_more()
        fsync(descriptor)

    sys.addaudithook(hook)  # can't be taken away again: this is for a process that ends soon
    os.fsync = counted
    try:
        act()
    finally:
        watching = False
        os.fsync = fsync
    return next(calls) - 1


def in_a_fork(act):
    """What `act` returns in a forked process (a small int); None if it was killed there."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            code = act()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != 255, "the forked process failed"
    return None if status == 254 else status


def test_a_kill_at_any_call_leaves_a_whole_checkpoint_and_the_next_save_works(tmp_path):
    whole = calls_of_a_save(fresh(tmp_path))
    assert whole > 20
    outcomes = set()
    for number in range(1, whole + 1):
        run_dir = fresh(tmp_path)
        made = open_checkpoints(run_dir)
        save(made, 1)

        def killed(run_dir=run_dir, made=made, number=number):
            return count_file_calls(run_dir, lambda: save(made, 2), number, lambda: os._exit(254))

        assert in_a_fork(killed) is None
        found = versions(run_dir)
        assert found in ([1], [2, 1])
        outcomes.add(tuple(found))
        save(open_checkpoints(run_dir), 3)
        assert versions(run_dir) == [3, *found]
        assert not [name for name in entries(run_dir) if name.startswith(".tmp")]
    assert outcomes == {(1,), (2, 1)}


def test_a_call_that_fails_anywhere_leaves_nothing_of_the_save(tmp_path):
    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing(run_dir, made, number):
        try:
            count_file_calls(run_dir, lambda: save(made, 2), number, fail)
        except CheckpointError as error:
            assert "Input/output error" in str(error)
            return 1
        except OSError:  # of the log of events, which is none of ours, or of Python itself
            return 2
        return 0

    outcomes = []
    for number in range(1, calls_of_a_save(fresh(tmp_path)) + 1):
        run_dir = fresh(tmp_path)
        made = open_checkpoints(run_dir)
        save(made, 1)
        outcomes.append(in_a_fork(partial(failing, run_dir, made, number)))
        found = versions(run_dir)
        assert found in ([1], [2, 1])
        save(open_checkpoints(run_dir), 3)
        assert versions(run_dir)[0] == 3
        assert not [name for name in entries(run_dir) if name.startswith(".tmp")]
    assert outcomes.count(1) > 10


def calls_of_a_save(run_dir):
    made = open_checkpoints(run_dir)
    save(made, 1)
    return in_a_fork(lambda: count_file_calls(run_dir, lambda: save(made, 2)))


numbers = itertools.count()


def fresh(tmp_path):
    run_dir = tmp_path / f"run-{next(numbers)}"
    run_dir.mkdir()
    return run_dir
