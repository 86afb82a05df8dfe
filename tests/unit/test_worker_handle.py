"""A worker's place whose process ends: whatever goes wrong in the telling of it is told itself, once."""

import asyncio
import os

import pytest

from pipeline.processes.worker.worker_handle import WorkerHandle
from shm.errors import HeadwayError


class Ended:
    """A process whose sentinel has fired; what it said last can't be had."""

    pid, alive, log_path, ended_by_signal = 1, False, "", False

    def __init__(self):
        self.sentinel, self._other_end = os.pipe()
        os.close(self._other_end)  # readable from now on, until it is closed

    def log_to(self, path):
        pass

    def wait(self, seconds):
        return True

    def describe_end(self):
        return "ended with status 3"

    def last_words(self):
        raise HeadwayError("no words")

    def close(self):
        os.close(self.sentinel)


class Link:
    def attach(self, on_message, on_error):
        pass

    def send(self, message):
        pass

    drain = detach = close = lambda self: None


def test_an_end_whose_sentinel_the_loop_has_lost_is_told_when_somebody_looks(tmp_path):
    deaths = []

    async def run():
        handle._process, handle._link = Ended(), Link()
        handle._process.last_words = str
        handle.attach()
        handle.on_death = deaths.append
        asyncio.get_running_loop().remove_reader(handle._process.sentinel)
        await asyncio.sleep(0.05)
        assert deaths == []
        handle.notice_end()
        handle.notice_end()

    handle = WorkerHandle("sampler", 0, "workers.sampler", 1)
    asyncio.run(run())
    assert [str(death) for death in deaths] == ["The sampler 0 (pid 1) ended with status 3."] and not handle.started


@pytest.mark.parametrize("is_awaited", [True, False])
def test_an_end_that_cannot_be_told_ends_the_run_and_not_in_silence(is_awaited, tmp_path):
    errors = []

    def fail(error):
        """As a run does."""
        errors.append(error)
        handle.give_up(error)

    async def run():
        handle._process, handle._link = Ended(), Link()
        handle.on_error = fail
        handle.attach()
        if is_awaited:
            with pytest.raises(HeadwayError, match="no words"):
                await asyncio.wait_for(handle.start({}, str(tmp_path)), 10.0)
        while not errors:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # a sentinel that is still watched fires again

    handle = WorkerHandle("sampler", 0, "workers.sampler", 1)
    asyncio.run(asyncio.wait_for(run(), 10.0))
    assert [str(error) for error in errors] == ["no words"] and not handle.started
