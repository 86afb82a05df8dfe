"""Every metric of the trainer on scripted runs, worked out by hand: real loop, schedule and rollouts, played processes.

A token takes 10 s, a prompt has 3 tokens, a reply of the environment 3. The learner takes 3 s for gradients and 2 s
for a step.
"""

import asyncio
import os
import time
from array import array
from types import SimpleNamespace

import pytest

import pipeline as rl
from pipeline.journal.recorder import Recorder
from pipeline.processes.learner.slot_table import SlotTable
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.rollouts import RolloutRules, Rollouts
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.schedule import Scheduler, ScheduleRules
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.training.training_loop import TrainingLoop
from shm.ledger import Ledger, LedgerShape
from tests import virtual_clock
from tests.defined_metrics import metric_of
from tests.unit.played_rollouts import Chat, Hosts, Run
from workers.messages import Published

GRADIENT_SECONDS, STEP_SECONDS = 3.0, 2.0
LEARNER = {
    "train/loss": -0.25,
    "train/tokens": 9.0,
    "train/forward_seconds": 1.0,
    "train/backward_seconds": 2.0,
    "importance/ratio_mean": 1.0,
}


class PlayedLearner:
    """Takes its time, and says what it was made to say."""

    async def forward_backward(self, batch, rows, *, zero_gradients):
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(GRADIENT_SECONDS, future.set_result, dict(LEARNER))
        return future

    async def optim_step(self, batch, *, from_version, slot, groups, epoch, lr, gradient_scale):
        await asyncio.sleep(GRADIENT_SECONDS + STEP_SECONDS)
        metrics = {"train/optimizer_seconds": 1.5, "train/publish_seconds": 0.5, "publish_bytes": 4.0}
        return Published(version=from_version + 1, slot=slot, metrics=metrics)


class PlayedRun(Run):
    """What the training loop needs of an ActiveRun beyond what rollouts do."""

    standing_still = ""

    def __init__(self, script, num_slots):
        super().__init__(script, 10, 1000, Hosts(script))
        shape = LedgerShape(num_slots=num_slots, num_reservations=8, num_workers=0)
        self.ledger = Ledger(memoryview(array("q", [0] * (shape.num_bytes // 8))).cast("B"), shape)
        self.ledger.format(1)
        self.spec = SimpleNamespace(max_context_tokens=1000, num_slots=num_slots)
        self.slots = SlotTable(num_slots, lambda slot, leases: None, lambda version: None)
        self.slots.published(0, 0)
        self.logged = []
        self.events = SimpleNamespace(
            log=lambda event, **fields: self.logged.append({"event": event} | fields), flush=lambda: None
        )
        self.learner = PlayedLearner()
        self.num_restarts = self.num_log_cuts = 0
        self.time_rows = {}
        self.workers = SimpleNamespace(pids={"supervisor": os.getpid()})


def members(*scripts):
    """(turns, tool_ticks, reward) of each member."""
    return {
        "prompt": 3,
        "members": [{"turns": list(turns), "tool_ticks": tool, "reward": reward} for turns, tool, reward in scripts],
    }


def play(monkeypatch, script, *, pauses=(), num_slots=4, groups_per_step=1, **options):
    """The metrics of each batch, and the run. pauses: the caller's seconds before each step but the first."""

    async def train():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "monotonic", loop.time)
        run = PlayedRun(script, num_slots)
        config = TrainerConfig(
            engine=EngineConfig(),
            optimizer=rl.Adam(lr=0.5),
            loss=rl.CISPO(normalize="token"),
            completion=rl.GroupCompletion(mode="wait"),
            groups_per_step=groups_per_step,
            group_size=2,
            max_staleness=1,
            **options,
        )
        rules = ScheduleRules(
            groups_per_step=groups_per_step,
            group_size=2,
            max_staleness=1,
            steps=len(script) // groups_per_step,
            num_rows=len(script),
            stale_policy=config.stale_policy,
        )
        counters = SamplingCounters(loop.time)
        rows, log = [{}] * len(script), RolloutLog(run.events, counters)
        rollouts = Rollouts(config.engine, run, Chat(), rows, 2, log, RolloutRules(concurrency=8))
        recorder = Recorder(SimpleNamespace(append=lambda record: None, sync=lambda: None), run.events)
        training = TrainingLoop(config, run, Scheduler(rules), rollouts, counters, None, loop.time, recorder=recorder)
        steps = []
        for pause in (0, *pauses):
            await asyncio.sleep(pause)
            steps.append((await training.step()).metrics)
        await rollouts.stop()
        return steps, run

    return virtual_clock.run(train())


def assert_metrics(found, **expected):
    """Keyword a__b is the key a/b."""
    for name, value in expected.items():
        key = name.replace("__", "/")
        assert found[key] == pytest.approx(value), key


def test_three_batches_of_an_asynchronous_run(monkeypatch):
    script = [
        members(((2,), 5, 1.0), ((4,), 0, 0.0)),  # ends at 25 and 40
        members(((1, 3), 10, 1.0), ((1,), 20, 3.0)),  # 10, tool until 20, 50, ends at 60; ends at 30
        members(((2,), 0, 2.0), ((2,), 0, 2.0)),  # admitted at 52, ends at 72: equal rewards
    ]
    (first, second, third), run = play(monkeypatch, script, pauses=(7, 0))
    assert all(metric_of(key) for step in (first, second, third) for key in step)

    # Groups 0 and 1 are admitted at 0 under version 0; group 0 is ready at 40 and trains until 45.
    assert_metrics(
        first,
        reward__mean=0.5,
        reward__std=0.5,
        reward__zero_variance_group_frac=0,
        staleness__span_age_p50=0,
        staleness__span_age_p99=0,
        staleness__span_age_max=0,
        staleness__frac_masked=0,
        staleness__wait_seconds=0,
        staleness__wait_count=0,
        staleness__slot_wait_seconds=0,
        staleness__reserved_groups=1,
        length__generated_p50=3,
        length__generated_p99=2 + 0.99 * 2,
        groups__mean_wait_seconds=40,
        groups__deadline_frac=0,
        groups__failed=0,
        groups__filtered=0,
        throughput__queue_depth=0,
        train__generated_tokens=6,
        train__active_tokens=6,
        train__active_sequences=2,
        train__active_groups=1,
        train__datums=2,
        train__updated=1,
        train__backward_chunks=1,
        train__gradient_scale=1,
        train__batch_seconds=45,
        train__seconds=5,
        train__tokens=9,
        train__tokens_per_second=9 / 45,
        train__lr=0.5,
        train__loss=-0.25,
        train__forward_seconds=1,
        train__backward_seconds=2,
        train__optimizer_seconds=1.5,
        train__publish_seconds=0.5,
        importance__ratio_mean=1,
        sampling__interval_seconds=45,
        sampling__requests=4,  # 2 and 4 tokens of group 0, 1 and 1 of group 1
        sampling__prompts=4,
        sampling__generated_tokens=8,
        sampling__generated_tokens_per_second=8 / 45,
        sampling__prompt_tokens=4 * 3,
        sampling__cached_prompt_tokens=0,
        sampling__cached_prompt_fraction=0,
        sampling__kv_refreshes=0,
        sampling__concurrency_mean=(25 + 40 + 45 + 30) / 45,
        sampling__inflight_trajectories=1,
        sampling__inflight_requests=1,
        sampling__ready_prompts=0,
        time__trainer_busy_seconds=5,
        time__trainer_waiting_seconds=40,
        time__trainer_idle_seconds=0,
        recovery__retries=0,
        recovery__restarts=0,
    )
    # The caller takes 7 s; group 2 is admitted at 52 under version 1; group 1, of version 0, is ready at 60.
    assert_metrics(
        second,
        reward__mean=2,
        reward__std=1,
        staleness__span_age_p50=1,
        staleness__span_age_max=1,
        staleness__reserved_groups=1,
        length__generated_p50=2.5,
        groups__mean_wait_seconds=60,
        train__generated_tokens=5,
        train__batch_seconds=13,
        train__seconds=5,
        sampling__interval_seconds=20,
        sampling__requests=1,
        sampling__generated_tokens=3,
        sampling__prompt_tokens=3 + 1 + 3,
        sampling__concurrency_mean=(15 + 2 * 13) / 20,
        sampling__inflight_trajectories=2,
        sampling__inflight_requests=2,
        time__trainer_busy_seconds=5,
        time__trainer_waiting_seconds=8,
        time__trainer_idle_seconds=7,
    )
    # Group 2 is ready at 72 and has no gradient: no update, and nothing of the learner's.
    assert_metrics(
        third,
        reward__mean=2,
        reward__std=0,
        reward__zero_variance_group_frac=1,
        staleness__span_age_max=1,
        staleness__reserved_groups=0,
        train__updated=0,
        train__datums=0,
        train__backward_chunks=0,
        train__active_tokens=4,
        train__batch_seconds=7,
        train__seconds=0,
        time__trainer_waiting_seconds=7,
    )
    assert "train/loss" not in third and "importance/ratio_mean" not in third
    assert run.slots.committed == 2


def test_means_and_shares_of_a_batch_of_several_groups(monkeypatch):
    script = [
        members(((1,), 0, 1.0), ((1,), 0, 0.0)),  # ready at 10
        members(((3,), 0, 0.5), ((3,), 0, 0.5)),  # ready at 30: equal rewards
        members(((2,), 0, 4.0), ((2,), 0, 2.0)),  # ready at 20
        members(((4,), 0, 1.0), ((4,), 0, 0.0)),  # ready at 40
    ]
    (first, second), _ = play(monkeypatch, script, pauses=(0,), groups_per_step=2)
    # Groups 0 and 2 train from 20 to 25; groups 1 and 3 from 40.
    assert_metrics(
        first,
        reward__mean=7 / 4,
        reward__zero_variance_group_frac=0,
        groups__mean_wait_seconds=(10 + 20) / 2,
        train__active_groups=2,
        train__active_sequences=4,
        train__active_tokens=6,
        staleness__reserved_groups=2,
        throughput__queue_depth=0,
    )
    assert_metrics(
        second,
        reward__zero_variance_group_frac=1 / 2,
        groups__mean_wait_seconds=(30 + 40) / 2,
        train__active_groups=2,
        train__datums=2,
        staleness__reserved_groups=0,
    )


def test_a_wait_for_the_bound_is_told_from_a_lack_of_groups_and_divided_by_cause(monkeypatch):
    script = [
        members(
            ((3,), 60, 1.0), ((1,), 0, 0.0)
        ),  # sampling until 30, then a turn without calls, which brings the reward, until 90
        members(((1,), 0, 1.0), ((1,), 0, 0.0)),  # ready at 10
        members(((1,), 0, 1.0), ((1,), 0, 0.0)),  # admitted at 15, ready at 25
    ]
    (first, second, third), run = play(monkeypatch, script, pauses=(0, 0))
    assert_metrics(first, staleness__wait_seconds=0, staleness__wait_count=0, staleness__reserved_groups=1)
    # Group 2 is there from 25 on, but group 0, of version 0, must train now; it samples until 30.
    assert_metrics(
        second,
        staleness__wait_seconds=65,
        staleness__wait_count=1,
        staleness__span_age_max=1,
        train__batch_seconds=80,
        time__trainer_waiting_seconds=75,
        throughput__queue_depth=1,
    )
    assert second["staleness/wait_seconds/sampling"] == pytest.approx(5)
    assert second["staleness/wait_seconds/reward"] == pytest.approx(60)
    assert_metrics(third, staleness__wait_seconds=0, staleness__span_age_max=1)
    waits = [event for event in run.logged if event["event"] == "wait" and event["why"] not in ("ready",)]
    assert {event["trajectory"] for event in waits} == {"0.0"}
    assert sum(event["seconds"] for event in waits) == pytest.approx(65)


@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.ConfigWarning")
def test_a_wait_for_a_slot_is_counted_apart(monkeypatch):
    script = [
        members(((10,), 0, 1.0), ((1,), 0, 0.0)),  # leases version 0 until 100
        members(((1,), 0, 1.0), ((1,), 0, 0.0)),  # ready at 10
        members(((1,), 0, 1.0), ((1,), 0, 0.0)),  # admitted at 15, ready at 25
    ]
    (_, second, third), run = play(
        monkeypatch, script, pauses=(0, 0), num_slots=2, stale_policy="keep", allow_unbounded_staleness=True
    )
    assert_metrics(
        second,
        staleness__slot_wait_seconds=75,
        staleness__wait_seconds=0,
        staleness__wait_count=0,
        staleness__reserved_groups=0,
        train__batch_seconds=90,
        time__trainer_waiting_seconds=10 + 75,
        time__trainer_busy_seconds=5,
    )
    assert_metrics(third, staleness__slot_wait_seconds=0, staleness__span_age_max=2)
    slot_waits = [event for event in run.logged if event["event"] == "wait" and event["why"] == "slot"]
    assert slot_waits and all(event["trajectory"] == "0.0" for event in slot_waits)
    assert sum(event["seconds"] for event in slot_waits) == pytest.approx(75)
