"""What rollouts tell the audit log and the sampling counters, in one place: the words of each event."""

from pipeline.errors import TookTooLongError, TrajectoryError
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.run_dir.events import EventLog
from pipeline.trajectory import Trajectory
from workers.messages import EnvironmentReply


class RolloutLog:
    """events: the run's audit log; None for evaluations, which log no event of their own rollouts."""

    def __init__(self, events: EventLog | None, counters: SamplingCounters) -> None:
        self._events = events
        self.counters = counters

    def started(self, group: int, member: int, version: int | None, sampler: int) -> None:
        """version: the policy the trajectory is pinned to; None if each segment chooses its own."""
        if self._events is not None:
            self._events.log("started", trajectory=f"{group}.{member}", group=group, version=version, sampler=sampler)

    def segment(self, group: int, member: int, segment: SegmentResult, context_tokens: int, sampler: int) -> None:
        self.counters.add_segment(segment, context_tokens)
        if self._events is not None:
            self._events.log(
                "segment",
                trajectory=f"{group}.{member}",
                group=group,
                version=segment.version,
                kv_version=segment.kv_version,
                tokens=len(segment.tokens),
                cached=segment.cached,
                sampler=sampler,
                seconds=round(segment.seconds, 6),
            )

    def tools(self, group: int, member: int, reply: EnvironmentReply) -> None:
        for tool in reply.tools:
            self.counters.add_tool(tool.seconds, failed=tool.error is not None)
            if self._events is not None:
                self._events.log(
                    "tool",
                    trajectory=f"{group}.{member}",
                    group=group,
                    name=tool.name,
                    seconds=round(tool.seconds, 6),
                    error=tool.error,
                )

    def cut(self) -> None:
        """A tool's result was longer than the model may read."""
        self.counters.cut_results += 1

    def trajectory(self, trajectory: Trajectory) -> None:
        """It has ended, and has its reward."""
        if self._events is not None:
            self._events.log(
                "trajectory",
                trajectory=f"{trajectory.group}.{trajectory.member}",
                group=trajectory.group,
                tokens=trajectory.generated_tokens,
                reward=trajectory.reward,
                truncated=trajectory.truncated,
            )

    def failure(self, error: TrajectoryError) -> None:
        """An attempt at a trajectory has failed. What becomes of it is told by `retry`, or of its group."""
        self.counters.failures += 1
        self.counters.timeouts += isinstance(error, TookTooLongError)

    def retry(self, trajectory: Trajectory, attempt: int, cause: str, *, failures: int | None) -> None:
        """All of it is thrown away, and it starts again, for the `attempt`-th time. failures: how often it has failed
        by itself, this time too; None: it only shared a process with the guilty, which is none of the tries.
        """
        if failures is not None:
            self.counters.retries += 1
        else:
            self.counters.begun_anew += 1
        if self._events is not None:
            self._events.log(
                "retry",
                group=trajectory.group,
                trajectory=f"{trajectory.group}.{trajectory.member}",
                attempt=attempt,
                cause=cause,
                tokens=trajectory.generated_tokens,
                **({} if failures is None else {"failures": failures}),
            )
            if failures is not None:
                self._events.flush()  # a resumed run counts on from it, whatever kills this one

    def restored(self) -> None:
        """A trajectory goes on with its tokens, and its environment in another process."""
        self.counters.restored += 1

    def discarded(self, trajectory: Trajectory, cause: str) -> None:
        """It was stopped, and never trains."""
        if self._events is not None:
            self._events.log(
                "discarded",
                trajectory=f"{trajectory.group}.{trajectory.member}",
                group=trajectory.group,
                cause=cause,
                tokens=trajectory.generated_tokens,
            )
