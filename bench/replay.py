"""The schedule alone, replayed on a virtual clock: how fast a run could be if nothing but its own work took time.

Trajectories start oldest admission first as `concurrency` allows and hold their place for a known duration; the trainer
pulls completed groups one at a time, trains, and admits again. Sampling, tools and training run side by side and never
slow each other down; messages, publishing and batching are free.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.schedule import Batch, Scheduler, ScheduleRules


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One batch, in seconds of the virtual clock. wait_seconds: a full batch was ready, but the bound held it back."""

    groups: tuple[int, ...]
    train_at: float
    end_at: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Replay:
    """The whole run, batch by batch."""

    steps: tuple[ReplayStep, ...]

    @property
    def seconds(self) -> float:
        return self.steps[-1].end_at

    @property
    def busy_frac(self) -> float:
        """Share of the time in which the trainer trains."""
        return sum(step.end_at - step.train_at for step in self.steps) / self.seconds


@dataclass(slots=True)
class _Sampling:
    """The trajectories: queued in admission order, running in at most `concurrency` places, or done."""

    durations: Sequence[Sequence[float]]
    concurrency: int
    queued: deque[tuple[int, int]] = field(default_factory=deque)  # (group, member)
    running: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (end, group, member)
    unfinished: dict[int, int] = field(default_factory=dict)  # group -> members that have not ended
    completed: deque[tuple[float, int]] = field(default_factory=deque)  # (completed at, group), in that order

    def submit(self, group: int, now: float) -> None:
        """Queue a group's trajectories at `now`."""
        while self.running and self.running[0][0] <= now:
            self._end_first()
        members = self.durations[group % len(self.durations)]
        self.unfinished[group] = len(members)
        self.queued.extend((group, member) for member in range(len(members)))
        self._fill(now)

    def pull(self) -> tuple[float, int]:
        """(completed at, group) of the earliest completed group not pulled before."""
        while not self.completed:
            self._end_first()
        return self.completed.popleft()

    def _end_first(self) -> None:
        end, group, _ = heapq.heappop(self.running)
        self.unfinished[group] -= 1
        if not self.unfinished[group]:
            del self.unfinished[group]
            self.completed.append((end, group))
        self._fill(end)

    def _fill(self, now: float) -> None:
        while self.queued and len(self.running) < self.concurrency:
            group, member = self.queued.popleft()
            duration = self.durations[group % len(self.durations)][member]
            heapq.heappush(self.running, (now + duration, group, member))


def replay(
    rules: ScheduleRules, durations: Sequence[Sequence[float]], concurrency: int, train_seconds: Sequence[float]
) -> Replay:
    """Play the run to its end; every batch is an update.

    durations: seconds of each trajectory, one list per group in admission order. train_seconds: from the choice of a
    batch until its version is published, one number per batch. A list shorter than the run is used again from its
    start. Raises ValueError for an empty list or a concurrency below 1, and for `carry_over`, which splits groups.
    """
    if not train_seconds or not durations or not all(durations) or concurrency < 1 or rules.carry_over:
        raise ValueError("A replay needs durations for whole groups, training times and a concurrency of at least 1.")
    scheduler = Scheduler(rules)
    sampling = _Sampling(durations, concurrency)
    steps: list[ReplayStep] = []
    now = 0.0
    while not scheduler.finished:
        wait_seconds = 0.0
        for admission in scheduler.admit():
            sampling.submit(admission.group, now)
        while not isinstance(batch := scheduler.select(), Batch):
            waits = scheduler.pull_counts_as_wait()
            completed_at, group = sampling.pull()
            if waits:
                wait_seconds += max(0.0, completed_at - now)
            now = max(now, completed_at)
            scheduler.receive(group)
        train_at = now
        now += train_seconds[scheduler.batches % len(train_seconds)]
        scheduler.commit(batch, updated=True)
        steps.append(ReplayStep(batch.groups, train_at, now, wait_seconds))
    return Replay(tuple(steps))
