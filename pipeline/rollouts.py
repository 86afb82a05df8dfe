"""RolloutEngine: admitted groups in, finished groups out, at most `concurrency` trajectories at a time.

Oldest admission first. A trajectory is pinned to the version committed when it makes its first request, and leases
its slot until it ends. It stays with one sampler, its group's, so that the common prompt and its own earlier turns
are computed once.
"""

import asyncio
import hashlib
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.active_run import ActiveRun
from pipeline.config import Budget, KVCache, Schedule
from pipeline.env import Env
from pipeline.env_source import EnvSource
from pipeline.rendering import ChatFormat
from pipeline.sampler_client import SamplerClient, SegmentResult
from pipeline.sampling_counters import SamplingCounters
from pipeline.schedule import Admission
from pipeline.supervisor import Supervisor
from pipeline.trainer_config import EngineConfig
from pipeline.trajectory import Group, Trajectory
from pipeline.trajectory_loop import Generate, TrajectoryLoop
from workers.messages import EnvironmentReply


class RolloutEngine:
    """Rolls out trajectories of one environment on one model; give it to an `AsyncTrainer`.

    env: an `Env` class, or its import path `module:Class`; env_arguments are its keyword arguments, plain values. The
    other options are those of `EngineConfig`. Raises ConfigError for what does not fit together.
    """

    def __init__(
        self,
        model: Supervisor,
        env: type[Env] | str,
        *,
        schedule: Schedule | None = None,
        budget: Budget | None = None,
        env_arguments: dict[str, Any] | None = None,
        kv_cache: KVCache | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.env = EnvSource(env, env_arguments or {})
        self.config = EngineConfig(
            schedule=schedule or Schedule(), budget=budget or Budget(), kv_cache=kv_cache or KVCache(), **options
        )


@dataclass(slots=True)
class _Running:
    """A group that is being rolled out."""

    group: Group
    row: dict[str, Any]
    size: int
    sampler: SamplerClient | None = None
    pinned: int | None = None  # evaluations: the version given; training: the committed one at each first request
    loops: dict[int, TrajectoryLoop] = field(default_factory=dict)
    started: float = 0.0

    @property
    def is_training(self) -> bool:
        return self.group.group >= 0


class Rollouts:
    """The engine at work in one run. Finished groups, or the run's failure, come out of `completed`."""

    def __init__(self, engine: RolloutEngine, run: ActiveRun, chat: ChatFormat, rows: Sequence[dict], group_size: int):
        self.completed: asyncio.Queue[Group | BaseException] = asyncio.Queue()
        self.evaluated: asyncio.Queue[Group | BaseException] = asyncio.Queue()
        self.counters = SamplingCounters()
        self._config = engine.config
        # What the user allows, and model and KV pool can hold: beyond it a trajectory ends with cause `context`.
        self._budget = replace(engine.config.budget, max_context_tokens=run.spec.max_context_tokens)
        self._run = run
        self._chat = chat
        self._rows = rows
        self._group_size = group_size
        self._groups: dict[int, _Running] = {}
        self._queue: list[tuple[int, int, int]] = []  # (admitted version, group, member): a heap
        self._tasks: set[asyncio.Task] = set()
        run.on_failure(self.interrupt)

    def start(self, admissions: Sequence[Admission]) -> None:
        """Queue the trajectories of newly admitted groups."""
        for admission in admissions:
            group = Group(admission.group, admission.row, admission.version)
            self._add(_Running(group, self._rows[admission.row], self._group_size), admission.version)
        self._start_queued()

    def evaluate(self, rows: Sequence[dict], group_size: int, version: int) -> int:
        """Queue held-out rows, pinned to `version`; returns how many groups will come out of `evaluated`."""
        for index, row in enumerate(rows):
            group = Group(-1 - index, index, version)
            self._add(_Running(group, row, group_size, pinned=version), version)
        self._start_queued()
        return len(rows)

    def doing(self, group: int | None) -> tuple[str | None, str]:
        """(trajectory, what it is doing) of the member of `group` that has furthest to go, for those who wait."""
        running = self._groups.get(group) if group is not None else None
        if running is None:
            return None, "queue"
        if not running.loops:
            return None, "queue"
        _, member = min((loop.trajectory.num_turns, member) for member, loop in running.loops.items())
        return f"{group}.{member}", running.loops[member].doing

    async def stop(self) -> None:
        """Cancel what still runs."""
        self._queue.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _add(self, running: _Running, priority: int) -> None:
        running.started = time.monotonic()
        self._groups[running.group.group] = running
        for member in range(running.size):
            heapq.heappush(self._queue, (priority, running.group.group, member))

    def _start_queued(self) -> None:
        while self._queue and len(self._tasks) < self._config.schedule.concurrency and self._run.failure is None:
            _, group, member = heapq.heappop(self._queue)
            task = asyncio.get_running_loop().create_task(self._roll_out(self._groups[group], member))
            self._tasks.add(task)
            self.counters.change_active(+1)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self.counters.change_active(-1)
        if not task.cancelled() and task.exception() is not None:
            self._run.fail(task.exception())
        else:
            self._start_queued()

    async def _roll_out(self, running: _Running, member: int) -> None:
        """One trajectory: environment, lease, loop, and its place in the group."""
        group = running.group
        trajectory = Trajectory(group.group, member, group.row)
        environment = self._run.environments.open(group.group, member)
        pins: list[int] = []  # the version it is pinned to, once it is

        def begin() -> Generate:
            if running.sampler is None:
                running.sampler = min(self._run.samplers, key=lambda s: s.num_trajectories)
            running.sampler.num_trajectories += 1
            version = self._run.version if running.pinned is None else running.pinned
            slot = self._run.slots.lease(version)
            pins.append(version)
            if running.is_training:
                self._run.events.log(
                    "started",
                    trajectory=f"{group.group}.{member}",
                    group=group.group,
                    version=version,
                    sampler=running.sampler.index,
                )
            return self._generator(running, member, version, slot)

        def on_segment(segment: SegmentResult, context_tokens: int) -> None:
            self._note_segment(running, member, segment, context_tokens)

        loop = TrajectoryLoop(
            trajectory,
            self._budget,
            self._chat,
            environment,
            begin,
            on_segment,
            lambda reply: self._note_tools(running, member, reply),
        )
        running.loops[member] = loop
        try:
            await loop.run(running.row, _environment_seed(self._config.seed, group.group, member))
        finally:
            environment.drop()
            if pins:
                running.sampler.num_trajectories -= 1
                running.sampler.release(group.group, member)
                self._run.release(pins[0])
        self._finish(running, trajectory)

    def _generator(self, running: _Running, member: int, version: int, slot: int) -> Generate:
        group, sampler = running.group, running.sampler

        def generate(context: list[int], max_tokens: int, generated: int) -> asyncio.Future[SegmentResult]:
            self.counters.inflight += 1
            return sampler.generate(
                priority=group.version,
                group=group.group,
                member=member,
                version=version,
                slot=slot,
                context=context,
                max_tokens=max_tokens,
                generated=generated,
            )

        return generate

    def _note_segment(self, running: _Running, member: int, segment: SegmentResult, context_tokens: int) -> None:
        self.counters.inflight -= 1
        self.counters.add_segment(segment, context_tokens)
        if running.is_training:
            group = running.group.group
            self._run.events.log(
                "segment",
                trajectory=f"{group}.{member}",
                group=group,
                version=segment.version,
                kv_version=segment.version,
                tokens=len(segment.tokens),
                cached=segment.cached,
                sampler=running.sampler.index,
                seconds=round(segment.seconds, 6),
            )

    def _note_tools(self, running: _Running, member: int, reply: EnvironmentReply) -> None:
        group = running.group.group
        for tool in reply.tools:
            self.counters.add_tool(tool.seconds)
            if running.is_training:
                self._run.events.log(
                    "tool",
                    trajectory=f"{group}.{member}",
                    group=group,
                    name=tool.name,
                    seconds=round(tool.seconds, 6),
                    error=tool.error,
                )

    def _finish(self, running: _Running, trajectory: Trajectory) -> None:
        """The trajectory has its reward; the group is ready with its last member."""
        group = running.group
        group.trajectories.append(trajectory)
        del running.loops[trajectory.member]
        if running.is_training:
            self._run.events.log(
                "trajectory",
                trajectory=f"{group.group}.{trajectory.member}",
                group=group.group,
                tokens=trajectory.generated_tokens,
                reward=trajectory.reward,
                truncated=trajectory.truncated,
            )
        if len(group.trajectories) < running.size:
            return
        del self._groups[group.group]
        group.trajectories.sort(key=lambda one: one.member)
        group.seconds = time.monotonic() - running.started
        if running.is_training:
            self._run.events.log("ready", group=group.group)
        (self.completed if running.is_training else self.evaluated).put_nowait(group)

    def interrupt(self, error: BaseException) -> None:
        """Whoever waits for groups gets `error` after those that are finished."""
        self.completed.put_nowait(error)
        self.evaluated.put_nowait(error)


def _environment_seed(seed: int, group: int, member: int) -> int:
    """Distinct for every trajectory of a run, the same in every run with this seed."""
    digest = hashlib.blake2b(f"{seed}/{group}/{member}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
