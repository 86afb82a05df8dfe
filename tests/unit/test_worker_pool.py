"""The end of a Supervisor's processes: a signal that comes meanwhile is delivered, but only when the work is done."""

import errno
import os
import signal

import pytest

from pipeline.errors import RunError
from pipeline.processes.worker.worker_pool import HELD_BACK, WorkerPool


class Worker:
    """In the place of a WorkerHandle; while it is waited for, a signal comes."""

    def __init__(self, role, number):
        self.role = role
        self.calls = []
        self._number = number

    def detach(self):
        self.calls.append("detach")

    def ask_to_stop(self):
        self.calls.append("ask_to_stop")

    def wait(self, seconds):
        os.kill(os.getpid(), self._number)
        self.calls.append("wait")

    def discard(self):
        self.calls.append("discard")


def test_a_process_that_cant_be_started_leaves_no_socket(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("pipeline.processes.worker.worker_handle.WorkerProcess", refuse)
    pool = WorkerPool()
    try:
        handle = pool.handle("sampler", 0, "workers.sampler", 1)
        with pytest.raises(RunError, match="sampler 0 can't be started"):
            pool.spawn(handle, str(tmp_path))
        assert os.listdir(pool._sockets.path) == ["lock"] and handle.socket_state() == {}
    finally:
        pool.close()


@pytest.mark.parametrize("number", HELD_BACK, ids=lambda number: number.name)
def test_a_signal_while_processes_end_comes_when_all_have_ended(number):
    told = []
    workers = {(role, 0): Worker(role, number) for role in ("learner", "sampler")}
    pool = WorkerPool()
    pool._handles.update(workers)

    def note(number, frame):
        told.append((number, [worker.calls[-1] for worker in workers.values()]))

    before = signal.signal(number, note)
    try:
        pool.close()
        assert signal.getsignal(number) is note
    finally:
        signal.signal(number, before)
    assert told == [(number, ["discard", "discard"])]
    assert [worker.calls for worker in workers.values()] == [["detach", "ask_to_stop", "wait", "discard"]] * 2
    assert pool.handles == []
