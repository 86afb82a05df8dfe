"""The sampling requests of one trajectory: to which sampler they go, under which policy version, and its lease.

It stays with one sampler, its group's, so that the common prompt and its own earlier turns are computed once. With
`sampling_policy="trajectory"`, and in evaluations, it is pinned to the version committed when it makes its first
request, and leases its slot until it ends. With "segment" each request takes its version when it is sent
(`version_choice.py`): under `hold` the lease moves with it and is kept between requests, since the KV can't do without
a version of about its age; under `refill` it is held from sending to reply.
"""

import asyncio

from pipeline.processes.active_run import ActiveRun
from pipeline.processes.sampler.priority import Priority
from pipeline.processes.sampler.sampler_client import Pick, SamplerClient, SegmentResult
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.rollouts.version_choice import choose_version
from pipeline.trainer_config import EngineConfig


class TrajectoryRequests:
    """From a trajectory's first request to its end; `close` gives back what it holds, however it ends.

    priority: lower goes first when requests must wait. pinned: the version to sample under (evaluations); None: as the
    engine's `sampling_policy` says.
    """

    def __init__(
        self,
        run: ActiveRun,
        sampler: SamplerClient,
        group: int,
        member: int,
        *,
        priority: Priority,
        pinned: int | None,
        engine: EngineConfig,
        counters: SamplingCounters,
    ) -> None:
        self._run = run
        self.sampler = sampler
        self._group = group
        self._member = member
        self._priority = priority
        self._kv_cache = engine.kv_cache
        self._counters = counters
        self._leased: int | None = None
        self._last: int | None = None  # version and KV anchor of the last segment
        self._anchor: int | None = None
        self.version: int | None = None  # the one that all requests are pinned to; None: each chooses its own
        if pinned is not None or engine.sampling_policy == "trajectory":
            self.version = run.slots.committed if pinned is None else pinned
            self._lease(self.version)
        sampler.num_trajectories += 1

    @property
    def leased(self) -> int | None:
        """The version whose slot it holds now."""
        return self._leased

    def generate(self, context: list[int], max_tokens: int, generated: int) -> asyncio.Future[SegmentResult]:
        """One segment of at most `max_tokens` after `context`; `generated`: the trajectory's tokens so far."""
        future = self.sampler.generate(
            priority=self._priority,
            group=self._group,
            member=self._member,
            pick=self._pick,
            context=context,
            max_tokens=max_tokens,
            generated=generated,
        )
        if self.version is None:
            future.add_done_callback(self._answered)  # before whoever awaits it goes on
        return future

    def withdraw(self) -> None:
        """The trajectory is to end: a request that has not left yet is answered with no tokens."""
        self.sampler.withdraw(self._group, self._member)

    def close(self) -> None:
        """The trajectory has ended: its KV goes, and its lease once no sampler computes with the slot any more."""
        self.sampler.num_trajectories -= 1
        self.sampler.release(self._group, self._member, self._give_back)

    def _pick(self) -> Pick:
        """The request leaves now."""
        if self.version is not None:
            return Pick(self.version, self._run.slots.slot_of(self.version))
        choice = choose_version(
            self._kv_cache,
            committed=self._run.slots.committed,
            resident=self._run.slots.resident,
            last=self._last,
            anchor=self._anchor,
        )
        self._counters.kv_refreshes += choice.rebuilds_kv
        return Pick(choice.version, self._lease(choice.version), self._kv_cache.max_staleness)

    def _answered(self, future: asyncio.Future[SegmentResult]) -> None:
        """Without an answer the sampler may be at it still: `close` sees to the lease then."""
        if future.cancelled() or future.exception() is not None:
            return
        segment = future.result()
        self._last, self._anchor = segment.version, segment.kv_version
        if self._kv_cache.on_limit == "refill":
            self._give_back()

    def _lease(self, version: int) -> int:
        """Hold `version` instead of what was held; returns its slot."""
        slot = self._run.slots.lease(version)
        self._give_back()
        self._leased = version
        return slot

    def _give_back(self) -> None:
        if self._leased is not None:
            self._run.slots.release(self._leased)
            self._leased = None
