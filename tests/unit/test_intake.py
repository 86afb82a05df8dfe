"""Which finished groups are given up for their equal rewards, and when too many of them end the run."""

import asyncio
from types import SimpleNamespace

import pytest

from pipeline.config import Adam, GroupCompletion, Schedule, Truncation
from pipeline.errors import RunError
from pipeline.journal.recorder import Recorder
from pipeline.losses import CISPO
from pipeline.memory.make_spec import make_rules
from pipeline.rollouts.running_group import GroupFailed
from pipeline.schedule import Scheduler
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.training.intake import Intake
from pipeline.trajectory import Group, Span, Trajectory


class Rollouts:
    """Takes what is admitted; the test delivers."""

    def __init__(self):
        self.completed = asyncio.Queue()
        self.started = []
        self.deliver = None

    def start(self, admissions, kept=None):
        self.started += [admission.group for admission in admissions]

    def row_id(self, row):
        return None

    def interrupt(self, error):
        self.completed.put_nowait(error)


class Play:
    """An intake that has admitted two groups, of a run that replaces those of equal rewards, if not told otherwise."""

    def __init__(self, **options):
        defaults = {"engine": EngineConfig(), "groups_per_step": 2, "max_staleness": 0}
        config = TrainerConfig(
            optimizer=Adam(lr=1e-3),
            loss=CISPO(normalize="token"),
            zero_variance="replace",
            group_size=4,
            **(defaults | {"completion": GroupCompletion(mode="wait")} | options),
        )
        rules = make_rules(config, rows=[{}] * 9, steps=9)
        self.events = []
        run = SimpleNamespace(
            ledger=SimpleNamespace(write_reservations=lambda epoch, reservations: None),
            events=SimpleNamespace(
                log=lambda event, **fields: self.events.append((event, fields.get("group"))), flush=lambda: None
            ),
        )
        self.rollouts = Rollouts()
        self.journal = SimpleNamespace(append=lambda record: None)
        self.failures = []
        run.fail = self.failures.append
        recorder = Recorder(self.journal, run.events)
        self.intake = Intake(config, run, Scheduler(rules), self.rollouts, recorder)
        self.intake.admit()

    def deliver(self, index, rewards, causes=(None,) * 4):
        spans = [Span("prompt", [1]), Span("generated", [2], 0, 0, [-1.0])]
        members = [
            Trajectory(index, member, index, spans, reward, truncated=cause)
            for member, (reward, cause) in enumerate(zip(rewards, causes, strict=True))
        ]
        self.rollouts.deliver(Group(index, index, 0, members))

    @property
    def filtered(self):
        return [group for event, group in self.events if event == "filtered"]


@pytest.mark.parametrize(
    ("usable", "is_given_up"),
    [([0.5, 0.5, 0.5], True), ([0.5, 0.5, 0.25], False), ([0.5, 0.5], False), ([0.5], False), ([], True)],
)
def test_a_group_with_too_few_rewards_for_its_own_baseline_is_kept_for_that_of_its_batch(usable, is_given_up):
    """min_members is 3; members that are cut short count in no baseline."""
    play = Play(
        completion=GroupCompletion(mode="wait", min_members=3),
        truncation=Truncation(train="drop_and_exclude_from_baseline"),
        allow_trajectory_loss=True,
    )
    missing = 4 - len(usable)
    play.deliver(0, [*usable, *[0.5] * missing], [*[None] * len(usable), *["turns"] * missing])
    assert play.filtered == ([0] if is_given_up else [])
    assert play.intake.depth == (not is_given_up)
    assert play.rollouts.started == ([0, 1, 2] if is_given_up else [0, 1])


@pytest.mark.parametrize("kept_between", [False, True])
def test_only_groups_given_up_one_after_another_end_the_run(monkeypatch, kept_between):
    monkeypatch.setattr("pipeline.training.intake.MAX_GIVEN_UP", 1)
    monkeypatch.setattr("pipeline.training.intake.MAX_GIVEN_UP_BATCHES", 2)
    play = Play()
    for index in (0, 2, 3):
        play.deliver(index, [0.5] * 4)
    if kept_between:
        play.deliver(1, [0.0, 1.0, 0.5, 0.5])
        assert play.intake.get_nowait().group == 1
    play.deliver(4, [0.5] * 4)
    assert play.filtered == [0, 2, 3, 4]
    if kept_between:
        assert play.intake.empty
    else:
        assert isinstance(error := play.intake.get_nowait(), RunError) and "4 groups in a row" in str(error)


@pytest.mark.parametrize(
    ("between", "is_over"),
    [(None, True), ("failed", True), ("kept", False), ("filtered", False)],
)
def test_fewer_groups_that_took_too_long_end_the_run(between, is_over):
    """With the default limits each of them takes half an hour. Two groups run at a time, so eight are enough."""
    play = Play(on_failure="replace")
    failed = [GroupFailed(index, f"reward of trajectory {index}.0 took longer", 0, True) for index in range(8)]
    for one in failed[:7]:
        play.rollouts.deliver(one)
    assert play.intake.empty
    if between == "failed":
        play.rollouts.deliver(GroupFailed(8, "reward raised", 0, False))
    elif between is not None:
        play.deliver(8, [0.5] * 4 if between == "filtered" else [0.0, 1.0, 0.5, 0.5])
    if between == "kept":
        assert play.intake.get_nowait().group == 8
    play.rollouts.deliver(failed[7])
    assert play.intake.empty != is_over
    if is_over:
        error = play.intake.get_nowait()
        assert isinstance(error, RunError) and str(error).startswith("8 groups in a row were given up because")
        assert str(error).endswith("The last: group 7: reward of trajectory 7.0 took longer")


@pytest.mark.parametrize(("concurrency", "enough"), [(100, 36), (40, 20), (1, 8)])
def test_how_many_that_took_too_long_are_enough_goes_by_how_many_run_at_a_time(concurrency, enough):
    """18 are let in at a time; with places for 40 trajectories, ten groups of four run; with one place, one."""
    engine = EngineConfig(schedule=Schedule(concurrency=concurrency, max_sample_requests=1))
    play = Play(on_failure="replace", groups_per_step=6, max_staleness=2, engine=engine)
    for index in range(enough):
        assert play.intake.empty
        play.rollouts.deliver(GroupFailed(index, "too long", 0, True))
    assert isinstance(play.intake.get_nowait(), RunError)


@pytest.mark.parametrize("rewards", [[0.5] * 4, [0.5, 0.5, 0.5, 0.25]], ids=["given up", "kept"])
def test_a_group_that_the_journal_has_no_room_for_ends_the_run(rewards):
    play, error = Play(), RunError("the disk is full")

    def refuse(record):
        raise error

    play.journal.append = refuse
    play.deliver(0, rewards)
    assert play.failures == [error]
    assert play.intake.depth == 0 and [event for event, _ in play.events] == ["admitted", "admitted"]
