"""The schedule replayed on a virtual clock, batch by batch, as the vectors have it.

The clock and the groups are the test's; every decision is `Scheduler`'s, and advantages, masks and ages are those of
`make_batch`, so that "no gradient, no update" is decided by the code that decides it in a run.
"""

import heapq

import pytest

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import make_batch
from pipeline.config import Truncation
from pipeline.schedule import Batch, Scheduler, ScheduleRules
from pipeline.trajectory import Group, Span, Trajectory
from tests import vectors

ESTIMATORS = {"GroupCentered": GroupCentered(), "Batchwise": Batchwise()}


class Replay:
    """One vector: its script, the clock, and what is on its way to the trainer."""

    def __init__(self, params: dict, script: dict) -> None:
        self.params = params
        self.script = script
        self.scheduler = Scheduler(
            ScheduleRules(
                groups_per_step=params["groups_per_step"],
                group_size=params["group_size"],
                max_staleness=params["max_staleness"],
                steps=params["steps"],
                num_rows=params["dataset_rows"],
                stale_policy=params["stale_policy"],
                admit_ahead=params["admit_ahead"],
                oversample_factor=params["oversample_factor"],
                batch_order=params["batch_order"],
                repeat_dataset=params["repeat_dataset"],
                carry_over=params.get("on_stragglers") == "carry_over",
            )
        )
        self.clock = 0
        self.update_ticks: list[int] = []  # when each update was committed
        self.admitted_at: dict[int, tuple[int, int]] = {}  # group -> (tick, version)
        self.finishing: list[
            tuple[int, int, int, list[int] | None, bool]
        ] = []  # heap: tick, group, part, members, final

    def run(self) -> list[dict]:
        steps = []
        while not self.scheduler.finished:
            steps.append(self.one_batch())
        return steps

    def one_batch(self) -> dict:
        start, version = self.clock, self.scheduler.version
        admissions = self.scheduler.admit()
        for admission in admissions:
            self.start_group(admission.group, admission.version)
        received, wait_count, wait_ticks = [], 0, 0
        while not isinstance(batch := self.scheduler.select(), Batch):
            counts = self.scheduler.pull_counts_as_wait()
            assert counts == (batch.why == "bound")
            tick, group, _, members, final = heapq.heappop(self.finishing)
            wait_count += counts
            wait_ticks += max(0, tick - self.clock) if counts else 0
            self.clock = max(self.clock, tick)
            self.scheduler.receive(group, members, final)
            received.append(group)
        trained = self.train(batch, version)
        updated = trained.rows.num_rows > 0
        if updated:
            ticks = self.script["train_ticks"]
            self.clock += ticks[len(self.update_ticks) % len(ticks)]
            self.update_ticks.append(self.clock)
        self.scheduler.commit(batch, updated)
        step = {
            "n": self.scheduler.batches,
            "model_step": self.scheduler.version,
            "updated": updated,
            "admitted": [[admission.group, admission.version, admission.row] for admission in admissions],
            "received": received,
            "consumed": list(batch.groups),
            "wait_count": wait_count,
            "wait_ticks": wait_ticks,
            "reserved_groups": self.scheduler.reserved_groups,
            "max_age": trained.age_max,
            "age_p50": trained.metrics["staleness/span_age_p50"],
            "age_p99": trained.metrics["staleness/span_age_p99"],
            "frac_masked": trained.metrics["staleness/frac_masked"],
            "batch_ticks": self.clock - start,
            "end_tick": self.clock,
        }
        if self.scheduler.rules.carry_over:
            step["consumed_members"] = [list(pair) for pair in zip(batch.groups, map(list, batch.members), strict=True)]
        return step

    def start_group(self, group: int, version: int) -> None:
        script = self.script["groups"][group]
        self.admitted_at[group] = (self.clock, version)
        if "parts" not in script:
            done = self.clock + script["start_delay"] + sum(script["segments"])
            heapq.heappush(self.finishing, (done, group, 0, None, True))
            return
        for index, part in enumerate(script["parts"]):
            final = index == len(script["parts"]) - 1
            heapq.heappush(self.finishing, (self.clock + part["at"], group, index, part["members"], final))

    def train(self, batch: Batch, version: int):
        wait, mask = (self.params["stale_policy"] == policy for policy in ("wait", "mask_span"))
        staleness = self.params["max_staleness"]
        parts = batch.members or [range(self.params["group_size"])] * len(batch.groups)
        rules = BatchRules(
            advantage=ESTIMATORS[self.params["advantage"]],
            normalize="token",
            truncation=Truncation(),
            mask_older_than=staleness if mask else None,
            max_age=staleness if wait else None,
        )
        groups = [self.group_result(group, members) for group, members in zip(batch.groups, parts, strict=True)]
        return make_batch(groups, version, rules)

    def group_result(self, group: int, members) -> Group:
        """The named members, each with one generated token per segment, under the version of the segment's start."""
        script = self.script["groups"][group]
        tick, admitted = self.admitted_at[group]
        starts = [tick + script["start_delay"] + sum(script["segments"][:i]) for i in range(len(script["segments"]))]
        if self.params["sampling_policy"] == "trajectory":
            starts = [starts[0]] * len(starts)
        versions = [sum(update <= start for update in self.update_ticks) for start in starts]
        assert min(versions) >= admitted
        spans = [Span("prompt", [1]), *(Span("generated", [2], version, version, [-1.0]) for version in versions)]
        trajectories = [Trajectory(group, m, 0, spans, reward=script["rewards"][m]) for m in members]
        return Group(group, group % self.params["dataset_rows"], admitted, trajectories)


@pytest.mark.parametrize("vector", vectors.load("schedule"))
def test_schedule_matches_vector(vector):
    found = Replay(vector["params"], vector["script"]).run()
    assert len(found) == len(vector["expected"])
    for step, expected in zip(found, vector["expected"], strict=True):
        exact = {name: step[name] for name in expected if not name.startswith(("age_", "frac_"))}
        assert exact == {name: expected[name] for name in exact}
        for name in ("age_p50", "age_p99", "frac_masked"):
            assert step[name] == pytest.approx(expected[name], rel=0, abs=1e-6), name
