"""Samplers whose weights go with the learner, as on a GPU: each place is taken once, at whatever moment that is."""

import asyncio

import pytest
from fake_sampler import REPLY_BYTES, REQUEST_BYTES, give_up

from pipeline.processes.sampler.run_samplers import RunSamplers
from pipeline.processes.worker.run_ends import RunEnds
from pipeline.user_warnings import RunWarning
from shm.queue import QueueConsumer, QueueProducer
from workers.errors import WorkerDied, WorkerFailed

SECONDS = 20.0


class Place:
    """In the place of one sampler's handle, of a run's workers and blocks, and of its log.

    stop_at: "" or "told", where a start stays until `go_on` is set: its process has said that it is ready, or, if it
    fails, that it can't be.
    """

    name, max_restarts, failure, fails = "sampler 0", 5, None, False

    def __init__(self):
        self.samplers, self.stop_at, self.go_on = [self], "", asyncio.Event()
        self.processes, self.lives, self.ready, self.pid = [], False, False, 0
        self.slots = {}  # by process, where it was told that the weights are
        self.on_death = lambda error: None
        self.spawn()

    def spawn(self):
        assert not self.lives, "a second process in the same place"
        self.lives, self.ready, self.death, self.pid = True, False, None, self.pid + 1

    def respawn(self, handle):
        self.spawn()

    async def start(self, handle, config, on_death):
        pid = self.pid
        self.slots[pid] = config["slots"]
        await asyncio.sleep(0)
        self.ready = True
        if self.stop_at == "told":
            await self.go_on.wait()
        if not self.lives or self.pid != pid:
            raise self.death or WorkerDied("It is not running.")
        if self.stop_at == "told" and self.fails:
            self.discard()
            raise WorkerFailed("There are no such slots.")
        self.on_death = on_death
        return {}

    def discard(self):
        self.lives = self.ready = False
        self.on_death = lambda error: None

    def kill(self):
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self):
        on_death, self.death = self.on_death, WorkerDied("It was killed.", by_signal=True)
        self.discard()
        on_death(self.death)

    def sampler_queues(self, index):
        requests, replies = (memoryview(bytearray(size)) for size in (REQUEST_BYTES, REPLY_BYTES))
        return QueueProducer(requests), QueueConsumer(replies), REPLY_BYTES, {}

    def sampler_config(self, index, slots):
        return {"slots": slots}

    def log(self, event, **fields):
        pass

    def send(self, message):
        assert self.lives


async def ticks():
    """Enough of them for whatever waits for nothing but its turn."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.filterwarnings(f"ignore::{RunWarning.__module__}.RunWarning")  # each restart is one
@pytest.mark.parametrize("at", ["serving", "told"])
def test_weights_that_go_while_a_sampler_serves_or_begins_to_leave_one_with_the_new_ones(at):
    async def lose():
        place, tasks = Place(), []

        def spawn_task(coroutine):
            tasks.append(asyncio.ensure_future(coroutine))

        samplers = RunSamplers(place, place, place, RunEnds(give_up, give_up, spawn_task), 10)
        place.stop_at = "told" if at == "told" else ""
        starting = asyncio.ensure_future(samplers.start({"slots": "old"}))
        await ticks()
        assert place.ready and starting.done() is (at == "serving")
        samplers.lose_weights()
        assert not samplers.clients[0].is_connected
        place.stop_at = ""
        place.go_on.set()
        await ticks()
        samplers.find_weights({"slots": "new"})
        await starting
        while tasks:
            await tasks.pop()
        assert place.lives and place.pid == 2 and samplers.clients[0].is_connected
        assert place.slots[place.pid] == {"slots": "new"} and samplers.num_restarts == 1

    asyncio.run(asyncio.wait_for(lose(), SECONDS))


@pytest.mark.filterwarnings(f"ignore::{RunWarning.__module__}.RunWarning")
@pytest.mark.parametrize("are_lost", [True, False])
def test_one_that_finds_no_slots_where_it_was_sent_breaks_a_rule_only_if_they_should_be_there(are_lost):
    async def lose():
        place = Place()
        samplers = RunSamplers(place, place, place, RunEnds(give_up, give_up, give_up), 10)
        place.stop_at, place.fails = "told", True
        place.kill = lambda: None  # it has ended already
        starting = asyncio.ensure_future(samplers.start({"slots": "old"}))
        await ticks()
        if are_lost:
            samplers.lose_weights()
        place.go_on.set()
        await ticks()
        if not are_lost:
            with pytest.raises(WorkerFailed, match="no such slots"):
                await starting
            return
        place.fails = False
        samplers.find_weights({"slots": "new"})
        await starting
        assert place.pid == 2 and place.slots[2] == {"slots": "new"}

    asyncio.run(asyncio.wait_for(lose(), SECONDS))
