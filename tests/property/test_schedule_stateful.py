"""The schedule against a slow oracle, in random runs.

The oracle knows the definitions alone: every admitted group must find a place in an update whose version is at most its
deadline. It tries every set of ready groups, and follows the updates to come one by one.
"""

import os
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.schedule import Batch, Blocked, Scheduler, ScheduleRules

BRIEF = settings(max_examples=70, stateful_step_count=40, deadline=None, derandomize=True)
# Hours of it: HEADWAY_SCHEDULE_EXAMPLES=100000 python -m pytest -m slow tests/property/test_schedule_stateful.py
LONG = settings(
    max_examples=int(os.environ.get("HEADWAY_SCHEDULE_EXAMPLES", "3000")),
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def all_train_in_time(deadlines: list[int], version: int, groups_per_update: int) -> bool:
    """Whether updates from `version` on, of `groups_per_update` groups each, can take every group by its deadline."""
    left = sorted(deadlines)
    while left:
        if left[0] < version:
            return False
        del left[:groups_per_update]
        version += 1
    return True


@dataclass
class Oracle:
    """What has happened to each group, and nothing derived from it."""

    rules: ScheduleRules
    version: int = 0
    batches: int = 0
    admitted: list[int] = field(default_factory=list)  # version at admission, by group
    received: set[int] = field(default_factory=set)
    trained: dict[int, int] = field(default_factory=dict)  # group -> version it trained at
    replaced: set[int] = field(default_factory=set)  # failed or filtered

    @property
    def owed(self) -> list[int]:
        return [
            group for group in range(len(self.admitted)) if group not in self.trained and group not in self.replaced
        ]

    @property
    def total(self) -> int:
        wanted = self.rules.steps * self.rules.groups_per_step
        return wanted if self.rules.repeat_dataset else min(wanted, self.rules.num_rows - len(self.replaced))

    @property
    def most_admitted(self) -> int:
        """n·G + T, from the definition."""
        ahead = (1 + min(self.rules.admit_ahead, self.rules.max_staleness)) * self.rules.groups_per_step
        window = (1 + self.rules.max_staleness) * self.rules.groups_per_step
        target = min(window, ceil(ahead * self.rules.oversample_factor))
        return min(self.total, self.batches * self.rules.groups_per_step + target)

    def may_train(self, groups: tuple[int, ...]) -> bool:
        """Whether these may train now: none too old, and all others still in time from the next version on."""
        left = [self.admitted[group] + self.rules.max_staleness for group in self.owed if group not in groups]
        young = all(self.version - self.admitted[group] <= self.rules.max_staleness for group in groups)
        return young and all_train_in_time(left, self.version + 1, self.rules.groups_per_step)

    def possible_batches(self) -> list[tuple[int, ...]]:
        """Every set of ready groups that may train now, the oldest first."""
        size = min(self.rules.groups_per_step, self.total - self.batches * self.rules.groups_per_step)
        owed = self.owed
        ready = [group for group in owed if group in self.received]
        if self.rules.batch_order == "admission":
            sets = [tuple(owed[:size])] if self.received.issuperset(owed[:size]) and len(owed) >= size else []
        else:
            sets = list(combinations(ready, size))
        return [groups for groups in sets if self.may_train(groups)]


@st.composite
def wait_rules(draw) -> ScheduleRules:
    groups_per_step = draw(st.integers(1, 3))
    num_rows = draw(st.integers(1, 20))
    repeat = draw(st.booleans())
    most = 8 if repeat else min(8, ceil(num_rows / groups_per_step))
    return ScheduleRules(
        groups_per_step=groups_per_step,
        group_size=2,
        max_staleness=draw(st.integers(0, 3)),
        steps=draw(st.integers(1, most)),
        num_rows=num_rows,
        admit_ahead=draw(st.integers(0, 4)),
        oversample_factor=draw(st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0])),
        batch_order=draw(st.sampled_from(["completion", "completion", "admission"])),
        repeat_dataset=repeat,
    )


class BoundedSchedule(RuleBasedStateMachine):
    """stale_policy wait: the bound holds, nobody is lost, nobody waits for ever."""

    @initialize(rules=wait_rules())
    def start(self, rules: ScheduleRules) -> None:
        self.oracle = Oracle(rules)
        self.scheduler = Scheduler(rules)
        self.admit()

    def admit(self) -> None:
        oracle = self.oracle
        for admission in self.scheduler.admit():
            assert admission.group == len(oracle.admitted)
            assert admission.row == admission.group % oracle.rules.num_rows
            assert admission.version == oracle.version
            oracle.admitted.append(admission.version)
        assert len(oracle.admitted) - len(oracle.replaced) == oracle.most_admitted

    def replace_one(self, group: int) -> None:
        oracle = self.oracle
        oracle.replaced.add(group)
        admission = self.scheduler.replace(group)
        if admission is None:
            assert not oracle.rules.repeat_dataset and len(oracle.admitted) == oracle.rules.num_rows
            return
        assert (admission.group, admission.version) == (len(oracle.admitted), oracle.version)
        assert admission.row == admission.group % oracle.rules.num_rows
        oracle.admitted.append(admission.version)

    @property
    def outstanding(self) -> list[int]:
        return [group for group in self.oracle.owed if group not in self.oracle.received]

    def receive_one(self, group: int) -> None:
        self.scheduler.receive(group)
        self.oracle.received.add(group)

    def train_one(self, batch: Batch, updated: bool) -> None:
        oracle = self.oracle
        for group in batch.groups:
            assert group in oracle.received and group not in oracle.trained
            age = oracle.version - oracle.admitted[group]
            assert 0 <= age <= oracle.rules.max_staleness
        oracle.trained.update(dict.fromkeys(batch.groups, oracle.version))
        oracle.batches += 1
        oracle.version += updated
        self.scheduler.commit(batch, updated)
        self.admit()

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def receive(self, data) -> None:
        self.receive_one(data.draw(st.sampled_from(self.outstanding)))

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def replace(self, data) -> None:
        self.replace_one(data.draw(st.sampled_from(self.outstanding)))

    @precondition(lambda self: not self.scheduler.finished and isinstance(self.scheduler.select(), Batch))
    @rule(updated=st.sampled_from([True, True, True, False]), data=st.data())
    def train(self, updated: bool, data) -> None:
        """Groups may be replaced between the choice of the batch and its end, and no reservation is missed by it."""
        batch, oracle = self.scheduler.select(), self.oracle
        for group in data.draw(
            st.lists(st.sampled_from(self.outstanding), unique=True) if self.outstanding else st.just([])
        ):
            self.replace_one(group)
            assert oracle.may_train(batch.groups)
        self.train_one(batch, updated)

    @precondition(lambda self: self.scheduler.finished)
    @rule()
    def nothing_follows_the_last_batch(self) -> None:
        assert self.scheduler.admit() == []

    @invariant()
    def every_owed_group_can_still_train(self) -> None:
        oracle = self.oracle
        deadlines = [oracle.admitted[group] + oracle.rules.max_staleness for group in oracle.owed]
        assert all_train_in_time(deadlines, oracle.version, oracle.rules.groups_per_step)

    @invariant()
    def selection_is_the_oldest_possible_batch(self) -> None:
        if self.scheduler.finished:
            assert len(self.oracle.trained) == self.oracle.total
            return
        found, possible = self.scheduler.select(), self.oracle.possible_batches()
        if isinstance(found, Batch):
            # combinations() go through the ready groups in admission order, so that the first is the earliest deadlines
            assert found == Batch(possible[0])
        else:
            assert not possible

    @invariant()
    def what_is_reported_is_so(self) -> None:
        oracle, scheduler = self.oracle, self.scheduler
        owed = oracle.owed
        assert scheduler.reservations() == [(group, oracle.admitted[group]) for group in owed]
        assert scheduler.reserved_groups == len(owed)
        assert scheduler.pending == len([group for group in owed if group in oracle.received])
        assert (scheduler.version, scheduler.batches) == (oracle.version, oracle.batches)
        if scheduler.finished:
            return
        found = scheduler.select()
        full = scheduler.pending >= oracle.rules.groups_per_step
        assert scheduler.pull_counts_as_wait() == (full and isinstance(found, Blocked))
        if isinstance(found, Blocked):
            assert found == Blocked("bound" if full else "ready", self.outstanding[0])  # so: never a deadlock

    def teardown(self) -> None:
        """The run comes to its end however it was left, even if the oldest groups come last."""
        if not hasattr(self, "oracle"):
            return
        while not self.scheduler.finished:
            if isinstance(batch := self.scheduler.select(), Batch):
                self.train_one(batch, updated=True)
            else:
                self.receive_one(self.outstanding[-1])
            self.every_owed_group_can_still_train()
        everyone = set(range(len(self.oracle.admitted)))
        assert set(self.oracle.trained) == everyone - self.oracle.replaced
        assert len(self.oracle.trained) == self.oracle.total


class UnboundedSchedule(RuleBasedStateMachine):
    """keep and mask_span: first come, first trained, by groups or by trajectories; each trajectory once."""

    @initialize(
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(1, 4),
        steps=st.integers(1, 6),
        max_staleness=st.integers(0, 2),
        carry_over=st.booleans(),
        stale_policy=st.sampled_from(["keep", "mask_span"]),
    )
    def start(self, **options) -> None:
        self.rules = ScheduleRules(num_rows=5, **options)
        self.scheduler = Scheduler(self.rules)
        self.running: dict[int, list[int]] = {}  # group -> members not received
        self.arrived: list[tuple[int, tuple[int, ...]]] = []  # results not trained
        self.trained: list[tuple[int, int]] = []
        self.replaced: set[int] = set()
        self.admit()

    def admit(self) -> None:
        for admission in self.scheduler.admit():
            self.running[admission.group] = list(range(self.rules.group_size))

    @precondition(lambda self: self.running and not self.rules.carry_over)
    @rule(data=st.data())
    def replace(self, data) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[group]
        admission = self.scheduler.replace(group)
        self.running[admission.group] = list(range(self.rules.group_size))
        self.replaced.add(group)

    def receive_some(self, group: int, count: int) -> None:
        members = self.running[group]
        part = tuple(members[:count])
        del members[:count]
        self.scheduler.receive(group, part, final=not members)
        self.arrived.append((group, part))
        if not members:
            del self.running[group]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def receive(self, data) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        most = len(self.running[group])
        self.receive_some(group, data.draw(st.integers(1, most)) if self.rules.carry_over else most)

    @precondition(lambda self: not self.scheduler.finished and isinstance(self.scheduler.select(), Batch))
    @rule(updated=st.booleans())
    def train(self, updated: bool) -> None:
        batch = self.scheduler.select()
        members = batch.members or [tuple(range(self.rules.group_size))] * len(batch.groups)
        taken = [(group, member) for group, part in zip(batch.groups, members, strict=True) for member in part]
        waiting = [(group, member) for group, part in self.arrived for member in part]
        # Whole groups or not, a batch is as many trajectories: groups_per_step * group_size
        assert taken == waiting[: self.rules.groups_per_step * self.rules.group_size]
        self.trained += taken
        gone = len(taken)
        while gone:
            group, part = self.arrived.pop(0)
            if len(part) > gone:
                self.arrived.insert(0, (group, part[gone:]))
            gone -= min(gone, len(part))
        self.scheduler.commit(batch, updated)
        self.admit()

    @precondition(lambda self: self.scheduler.finished)
    @rule()
    def nothing_follows_the_last_batch(self) -> None:
        assert self.scheduler.admit() == []

    @invariant()
    def a_batch_exists_once_enough_has_arrived(self) -> None:
        if self.scheduler.finished:
            return
        found = self.scheduler.select()
        enough = sum(len(part) for _, part in self.arrived) >= self.rules.groups_per_step * self.rules.group_size
        assert isinstance(found, Batch) == enough
        if not enough:
            assert found == Blocked("ready", min(self.running))
        assert not self.scheduler.pull_counts_as_wait()
        assert self.scheduler.reserved_groups == 0

    def teardown(self) -> None:
        if not hasattr(self, "rules"):
            return
        while not self.scheduler.finished:
            if isinstance(self.scheduler.select(), Batch):
                self.train(updated=True)
            else:
                self.receive_some(max(self.running), 1 if self.rules.carry_over else self.rules.group_size)
        kept = [g for g in range(self.scheduler.admitted) if g not in self.replaced]
        assert len(kept) == self.rules.total
        assert sorted(self.trained) == [(g, m) for g in kept for m in range(self.rules.group_size)]


TestBoundedSchedule = BoundedSchedule.TestCase
TestBoundedSchedule.settings = BRIEF
TestUnboundedSchedule = UnboundedSchedule.TestCase
TestUnboundedSchedule.settings = BRIEF


@pytest.mark.slow
@pytest.mark.timeout(0)
class TestBoundedScheduleLong(BoundedSchedule.TestCase):
    settings = LONG


@pytest.mark.slow
@pytest.mark.timeout(0)
class TestUnboundedScheduleLong(UnboundedSchedule.TestCase):
    settings = LONG
