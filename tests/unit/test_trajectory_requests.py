"""One trajectory's requests: which version each takes and what they lease, played with a sampler that waits."""

import asyncio

import pytest

from pipeline.config import KVCache
from pipeline.processes.learner.slot_table import SlotTable
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.rollouts.trajectory_requests import TrajectoryRequests
from pipeline.trainer_config import EngineConfig

HOLD = {"sampling_policy": "segment", "kv_cache": KVCache(max_staleness=2)}


def refill():
    with pytest.warns(UserWarning):
        kv_cache = KVCache(max_staleness=1, on_limit="refill", allow_reprefill=True)
    return {"sampling_policy": "segment", "kv_cache": kv_cache}


class Sampler:
    """Takes requests; `answer` gives the last one's future its segment."""

    def __init__(self):
        self.index, self.num_trajectories = 0, 0
        self.asked, self.released = [], []

    def generate(self, **request):
        self.asked.append(request | {"future": asyncio.get_running_loop().create_future()})
        return self.asked[-1]["future"]

    def release(self, group, member, then):
        self.released.append((group, member))
        then()

    async def answer(self, version, kv_version):
        self.asked[-1]["future"].set_result(SegmentResult([1], [0.0], version, kv_version, 0, False, 0.1, 0.0))
        await asyncio.sleep(0)


class Play:
    """A trajectory on four slots; version 0 is committed."""

    def __init__(self, pinned=None, **engine):
        self.leases = [0] * 4
        self.retired = []
        self.slots = SlotTable(4, self.leases.__setitem__, self.retired.append)
        self.slots.published(0, 0)
        self.counters, self.sampler = SamplingCounters(), Sampler()
        run = self
        self.requests = TrajectoryRequests(
            run, self.sampler, 3, 1, priority=0, pinned=pinned, engine=EngineConfig(**engine), counters=self.counters
        )

    def publish(self):
        slot = self.slots.slot_for_next()
        self.slots.published(self.slots.committed + 1, slot)

    def leased(self):
        return {version for version in self.slots.resident if self.slots.num_leases(version)}

    async def segment(self, kv_version=None, publishes=0):
        """One request, `publishes` versions while it runs, its reply; returns what it was sent with."""
        self.requests.generate([1, 2], 8, 0)
        pick = self.sampler.asked[-1]["pick"]()
        assert self.leased() == {pick.version} and self.slots.slot_of(pick.version) == pick.slot
        for _ in range(publishes):
            self.publish()
        assert self.leased() == {pick.version}
        await self.sampler.answer(pick.version, pick.version if kv_version is None else kv_version)
        return pick.version, pick.kv_max_age

    def close(self):
        self.requests.close()
        assert self.sampler.released == [(3, 1)] and self.sampler.num_trajectories == 0
        assert self.leases == [0, 0, 0, 0]
        assert self.slots.slot_for_next() is not None


def test_a_trajectory_keeps_its_version_and_its_lease_from_the_first_request_on():
    async def test():
        play = Play()
        assert play.requests.version == 0 and play.leased() == {0}
        play.publish()
        assert [await play.segment(publishes=1), await play.segment()] == [(0, 0), (0, 0)]
        assert play.leased() == {0}
        play.close()

    asyncio.run(test())


def test_an_evaluation_is_pinned_whatever_the_policy():
    async def test():
        play = Play(pinned=0, **HOLD)
        play.publish()
        assert await play.segment() == (0, 0) and play.requests.version == 0
        play.close()

    asyncio.run(test())


def test_hold_moves_its_lease_with_each_request_and_keeps_it_between_them():
    async def test():
        play = Play(**HOLD)
        assert play.requests.version is None and play.leased() == set()
        assert await play.segment(publishes=1) == (0, 2)
        assert play.leased() == {0}
        assert await play.segment(kv_version=0, publishes=2) == (1, 2)
        assert play.leased() == {1} and play.retired == [0, 2]  # 2 was passed over, so far
        assert await play.segment(kv_version=0) == (2, 2)  # 3 is committed, and too new for KV of version 0
        play.publish()
        assert await play.segment(kv_version=2) == (2, 2)  # the sampler had lost the KV and computed it anew
        play.publish()
        assert await play.segment(kv_version=2) == (4, 2)
        play.close()
        assert play.counters.kv_refreshes == 0

    asyncio.run(test())


def test_refill_leases_while_a_request_runs_and_counts_what_is_rebuilt():
    async def test():
        play = Play(**refill())
        assert await play.segment(publishes=1) == (0, 1)
        assert play.leased() == set() and play.retired == [0]
        assert await play.segment(kv_version=0, publishes=1) == (1, 1)
        assert play.counters.kv_refreshes == 0
        assert await play.segment() == (2, 1)  # over KV of version 0 it would be two versions old
        assert play.counters.kv_refreshes == 1
        play.close()

    asyncio.run(test())


def test_a_version_is_taken_when_the_request_leaves_not_when_it_is_asked_for():
    async def test():
        play = Play(**refill())
        play.requests.generate([1], 8, 0)
        play.publish()
        assert play.sampler.asked[-1]["pick"]().version == 1
        play.close()

    asyncio.run(test())


@pytest.mark.parametrize("end", ["cancel", "fail"])
@pytest.mark.parametrize("policy", ["hold", "refill"])
def test_a_request_without_an_answer_keeps_its_lease_to_the_end(policy, end):
    async def test():
        play = Play(**(HOLD if policy == "hold" else refill()))
        future = play.requests.generate([1], 8, 0)
        play.sampler.asked[-1]["pick"]()
        future.cancel() if end == "cancel" else future.set_exception(RuntimeError("the run is over"))
        await asyncio.sleep(0)
        assert play.leased() == {0}
        play.close()

    asyncio.run(test())
