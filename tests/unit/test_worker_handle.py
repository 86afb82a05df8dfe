"""A worker's place whose process ends: whatever goes wrong in the telling of it is told itself, once."""

import asyncio
import os

import pytest

from pipeline.processes.worker.worker_handle import WorkerHandle
from shm.errors import HeadwayError


class Ended:
    """A process whose sentinel has fired; what it said last can't be had."""

    pid, alive, log_path = 1, False, ""

    def __init__(self):
        self.sentinel, self._other_end = os.pipe()
        os.close(self._other_end)  # readable from now on, until it is closed

    def log_to(self, path):
        pass

    def wait(self, seconds):
        return True

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
