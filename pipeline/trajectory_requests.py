"""The sampling requests of one trajectory: to which sampler they go, under which policy version, and its lease.

A trajectory is pinned to the version committed when it makes its first request, and leases its slot until it ends. It
stays with one sampler, its group's, so that the common prompt and its own earlier turns are computed once.
"""

import asyncio

from pipeline.active_run import ActiveRun
from pipeline.sampler_client import SamplerClient, SegmentResult


class TrajectoryRequests:
    """From a trajectory's first request to its end; `close` gives back what it holds, however it ends.

    priority: lower goes first when requests must wait. pinned: the version to sample under (evaluations); None: the one
    committed now.
    """

    def __init__(
        self, run: ActiveRun, sampler: SamplerClient, group: int, member: int, priority: int, pinned: int | None
    ) -> None:
        self._run = run
        self.sampler = sampler
        self._group = group
        self._member = member
        self._priority = priority
        self.version = run.version if pinned is None else pinned
        self._slot = run.slots.lease(self.version)
        sampler.num_trajectories += 1

    def generate(self, context: list[int], max_tokens: int, generated: int) -> asyncio.Future[SegmentResult]:
        """One segment of at most `max_tokens` after `context`; `generated`: the trajectory's tokens so far."""
        return self.sampler.generate(
            priority=self._priority,
            group=self._group,
            member=self._member,
            version=self.version,
            slot=self._slot,
            context=context,
            max_tokens=max_tokens,
            generated=generated,
        )

    def close(self) -> None:
        """The trajectory has ended: its KV and its lease go."""
        self.sampler.num_trajectories -= 1
        self.sampler.release(self._group, self._member)
        self._run.release(self.version)
