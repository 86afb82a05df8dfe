"""Rollouts: admitted groups in, finished groups out, at most `concurrency` trajectories at a time, oldest admission
first.

What comes out are `Group`s, whole or in parts, and, where failed groups are replaced, `GroupFailed`.
"""

import asyncio
import hashlib
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipeline.chat.format import ChatFormat
from pipeline.config import GroupCompletion
from pipeline.dataset import row_id
from pipeline.errors import TrajectoryError
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.environment.environment_handle import EnvironmentLost
from pipeline.processes.sampler.priority import PREDICTED_LENGTH, LengthPredictor, Priority, priority_of
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.agent_loop import AgentLoop
from pipeline.rollouts.doing import Held
from pipeline.rollouts.kept_members import KeptMembers, RunningMember, pack_unfinished
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.running_group import GroupFailed, RunningGroup
from pipeline.rollouts.sampled_turns import GenerateSegment, SampledTurns
from pipeline.rollouts.trajectory_loop import TrajectoryLoop
from pipeline.rollouts.trajectory_requests import TrajectoryRequests
from pipeline.schedule import Admission
from pipeline.trainer_config import EngineConfig
from pipeline.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRules:
    """What one run's training, or one evaluation, asks of its rollouts.

    concurrency: most trajectories at a time. pinned: the version of every trajectory; None: each takes the committed
    one at its first request. completion: when a group goes out. oldest_first: groups admitted earlier come first where
    requests wait; by "predicted_length" they always do. replace_failed: a trajectory that fails ends its group, not the
    run. keeps_conversation: of which (group, member) the messages stay with the trajectory; None: of nobody.
    """

    concurrency: int
    pinned: int | None = None
    completion: GroupCompletion = field(default_factory=partial(GroupCompletion, mode="wait"))
    oldest_first: bool = True
    replace_failed: bool = False
    keeps_conversation: Callable[[int, int], bool] | None = None


class Rollouts:
    """The engine at work. Results go to `deliver`: as made, into the queue `completed`, in order of completion."""

    def __init__(
        self,
        config: EngineConfig,
        run: ActiveRun,
        chat: ChatFormat,
        rows: Sequence[dict],
        group_size: int,
        log: RolloutLog,
        rules: RolloutRules,
    ) -> None:
        self.completed: asyncio.Queue[Group | GroupFailed | BaseException] = asyncio.Queue()
        self.deliver: Callable[[Group | GroupFailed], None] = self.completed.put_nowait
        self.on_interrupt: Callable[[BaseException], None] = lambda error: None  # told at once of what `interrupt` is
        self._config = config
        # What the user allows, and model and KV pool can hold: beyond it a trajectory ends with cause `context`.
        self._budget = replace(config.budget, max_context_tokens=run.spec.max_context_tokens)
        self._run = run
        self._chat = chat
        self._rows = rows
        self._group_size = group_size
        self._log = log
        self._rules = rules
        self._groups: dict[int, RunningGroup] = {}
        self._lengths = LengthPredictor()
        self._queue: list[tuple[Priority, int, int]] = []  # (priority, group, member): a heap
        self._tasks: set[asyncio.Task] = set()
        run.on_failure(self.interrupt)

    def start(self, admissions: Sequence[Admission], kept: Mapping[int, KeptMembers] | None = None) -> None:
        """Queue the trajectories of newly admitted groups. kept: what an earlier run has done of some of them."""
        for admission in admissions:
            running = self._groups[admission.group] = RunningGroup(
                admission,
                self._rows[admission.row],
                self._group_size,
                self._rules.completion,
                self._log,
                lambda result: self.deliver(result),
            )
            order = self._config.schedule.priority
            # Lengths are compared within a version only: else short rows would wait behind those of newer versions.
            version = admission.version if self._rules.oldest_first or order == PREDICTED_LENGTH else 0
            priority = priority_of(order, version, admission.row, self._lengths)
            if kept is not None and admission.group in kept:
                of_group = kept[admission.group]
                running.resume(of_group)
                for member, saved in of_group.running.items():  # they had their places
                    self._start(running, member, priority, saved)
            for member in range(self._group_size):
                if running.wants(member) and member not in running.loops:
                    heapq.heappush(self._queue, (priority, admission.group, member))
        self._forget_done()
        self._start_queued()

    def _forget_done(self) -> None:
        for group in [group for group, running in self._groups.items() if running.done]:
            del self._groups[group]

    def row_id(self, row: int) -> str | int | None:
        """The id of the row of this index, if it has one."""
        return row_id(self._rows[row])

    def doing(self, group: int | None) -> Held:
        """What the member of `group` that has furthest to go is at, for those who wait for the group."""
        running = self._groups.get(group) if group is not None else None
        if running is None or not running.loops:
            behind = f"in line behind {len(self._tasks)} others (concurrency = {self._rules.concurrency})"
            return Held(None, "queue", behind)
        _, member = min((loop.trajectory.num_turns, member) for member, loop in running.loops.items())
        return self._held(running, member)

    def holding_oldest(self) -> Held | None:
        """The same of the running trajectory whose policy version is oldest; None: none.

        It holds that version's slot; one that has not asked for a segment yet holds none.
        """
        holding = [
            (requests.leased, group, member)
            for group, running in self._groups.items()
            for member, requests in running.requests.items()
            if requests.leased is not None
        ]
        if not holding:
            return None
        _, group, member = min(holding)
        return self._held(self._groups[group], member)

    def longest_at_one_thing(self) -> Held | None:
        """The same of the running trajectory that is at something since the earliest; None: none runs."""
        at = [(loop.doing.since, group, m) for group, one in self._groups.items() for m, loop in one.loops.items()]
        if not at:
            return None
        _, group, member = min(at)
        return self._held(self._groups[group], member)

    def state(self) -> dict[str, Any]:
        """For a report: what each running trajectory is at, and how many wait for their turn."""
        held = [self._held(running, member) for running in self._groups.values() for member in running.loops]
        return {"running": {one.trajectory: one.words for one in held}, "in_line": len(self._queue)}

    def _held(self, running: RunningGroup, member: int) -> Held:
        loop = running.loops[member]
        if loop.doing.cause == "sampling":
            ends_by = running.sampler.whereabouts(running.group, member)
        elif self._run.endpoint is None and loop.environment.waits_for_process:
            ends_by = "its environment process is being replaced"
        else:
            bounds = {"environment_timeout": self._config.environment_timeout}
            if self._run.endpoint is not None:
                bounds = {"idle_timeout": self._run.endpoint.idle_timeout}
            if running.is_timed(member):
                bounds = {"trajectory_timeout": self._config.trajectory_timeout} | bounds
            told = ", or ".join(f"{name} = {seconds:g} s" for name, seconds in bounds.items())
            ends_by = f"ended by {told} at the latest"
        return Held(f"{running.group}.{member}", loop.doing.cause, loop.doing.told(ends_by), running.group)

    def saved(self) -> list[bytes]:
        """What `start` can go on from in a resumed run, a part of the file for each unfinished group."""
        return [
            pack_unfinished(group, *running.unfinished(), running.attempts) for group, running in self._groups.items()
        ]

    async def stop(self) -> None:
        """Cancel what still runs."""
        self._queue.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def interrupt(self, error: BaseException) -> None:
        """Whoever waits for groups gets `error` after those that are finished."""
        self.completed.put_nowait(error)
        self.on_interrupt(error)

    def _start_queued(self) -> None:
        while self._queue and len(self._tasks) < self._rules.concurrency and self._run.failure is None:
            priority, group, member = heapq.heappop(self._queue)
            running = self._groups.get(group)
            if running is None or not running.wants(member):
                continue
            self._start(running, member, priority)

    def _start(
        self, running: RunningGroup, member: int, priority: Priority, saved: RunningMember | None = None
    ) -> None:
        """saved: where an earlier run stood."""
        loop = self._prepare(running, member, priority, saved)
        running.add(member, loop)
        task = asyncio.get_running_loop().create_task(self._work(running, member, priority, loop))
        self._tasks.add(task)
        self._log.counters.change_active(+1)
        task.add_done_callback(lambda task: self._ended(running, member, task))

    def _ended(self, running: RunningGroup, member: int, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._log.counters.change_active(-1)
        error = None if task.cancelled() else task.exception()
        if self._rules.replace_failed and isinstance(error, TrajectoryError) and self._run.failure is None:
            running.failed(member, error)
            error = None
        if error is not None:
            self._run.fail(error)
            return
        if running.done:
            self._groups.pop(running.group, None)
            self._run.environments.forget(running.group)
        self._start_queued()

    async def _work(
        self, running: RunningGroup, member: int, priority: Priority, loop: TrajectoryLoop | AgentLoop
    ) -> None:
        """A trajectory from its start to its end, with its environment and its lease. One that fails, or whose
        environment is lost, starts again: it keeps its place, its reservation and its noise, and takes the version
        committed by then.
        """
        while True:
            try:
                await loop.run(running.row, _environment_seed(self._config.seed, running.group, member))
                await self._instant_is_over()
                break
            except (EnvironmentLost, TrajectoryError) as error:
                if has_failed := isinstance(error, TrajectoryError):
                    running.count_failure(member, error, self._config.max_retries)
                again = self._prepare(running, member, priority)
                running.starts_again(member, again, str(error), has_failed=has_failed)
            finally:
                loop.close()
                running.close(member)
            loop = again
        if not loop.discarded:
            self._lengths.add(running.row_index, loop.trajectory.generated_tokens)
            keeps = self._rules.keeps_conversation
            if keeps is not None and keeps(running.group, member):
                loop.trajectory.conversation = loop.turns.conversation
        running.finished(member)

    def _prepare(
        self, running: RunningGroup, member: int, priority: Priority, saved: RunningMember | None = None
    ) -> TrajectoryLoop | AgentLoop:
        """The loop of a trajectory that has yet to start, or goes on from what an earlier run has saved: at once it
        leases its version then.
        """

        def begin() -> GenerateSegment:
            if running.sampler is None:
                running.sampler = min(self._run.samplers, key=lambda s: s.num_trajectories)
            made = TrajectoryRequests(
                self._run,
                running.sampler,
                running.group,
                member,
                priority=priority,
                pinned=self._rules.pinned if saved is None else saved.version,
                engine=self._config,
                counters=self._log.counters,
            )
            running.open(member, made, self._config.trajectory_timeout)
            if saved is None:
                self._log.started(running.group, member, made.version, made.sampler.index)
            running.started(member)
            return self._generate_for(running, member, made)

        turns = SampledTurns(
            Trajectory(running.group, member, running.row_index) if saved is None else saved.trajectory,
            self._budget,
            self._chat,
            begin,
            lambda segment, context: self._log.segment(running.group, member, segment, context, running.sampler.index),
        )
        endpoint = self._run.endpoint
        if endpoint is not None and not endpoint.calls_agents:
            return AgentLoop(turns, endpoint.sessions, None, endpoint.base_url, endpoint.idle_timeout)
        environment = self._run.environments.open(running.group, member)
        if endpoint is not None:
            return AgentLoop(turns, endpoint.sessions, environment, endpoint.base_url, endpoint.idle_timeout)
        loop = TrajectoryLoop(
            turns, environment, lambda reply: self._log.tools(running.group, member, reply), self._log.cut
        )

        def lost() -> None:
            loop.lose_environment()
            if member in running.requests:
                running.requests[member].withdraw()

        environment.on_lost, environment.on_restored = lost, self._log.restored
        if saved is not None:
            loop.resume(saved.state)
        return loop

    async def _instant_is_over(self) -> None:
        """With a deadline, the tokens of all requests that end in one tick are counted before anything follows."""
        if self._rules.completion.mode == "deadline":
            await asyncio.sleep(0)

    def _generate_for(self, running: RunningGroup, member: int, requests: TrajectoryRequests) -> GenerateSegment:
        counters = self._log.counters

        def answered(future: asyncio.Future[SegmentResult]) -> None:  # or cancelled
            counters.inflight -= 1
            if not future.cancelled() and future.exception() is None:
                running.generated(member, len(future.result().tokens))

        async def generate(context: list[int], max_tokens: int, generated: int) -> SegmentResult:
            counters.inflight += 1
            future = requests.generate(context, max_tokens, generated)
            future.add_done_callback(answered)
            segment = await future
            await self._instant_is_over()
            return segment

        return generate


def _environment_seed(seed: int, group: int, member: int) -> int:
    """Distinct for every trajectory of a run, the same in every run with this seed."""
    digest = hashlib.blake2b(f"{seed}/{group}/{member}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
