"""The schedule, case by case; `test_schedule_vectors.py` and `property/test_schedule_stateful.py` have the breadth."""

import pytest

from pipeline.errors import ConfigError
from pipeline.schedule import Batch, Blocked, ScheduleError, Scheduler, ScheduleRules


def scheduler(**changes) -> Scheduler:
    values = {"groups_per_step": 1, "group_size": 2, "max_staleness": 2, "steps": 100, "num_rows": 1000}
    return Scheduler(ScheduleRules(**(values | changes)))


def receive_all(made: Scheduler, *groups: int) -> None:
    for group in groups:
        made.receive(group)


# Admission


@pytest.mark.parametrize(
    ("groups_per_step", "max_staleness", "admit_ahead", "oversample_factor", "target"),
    [
        (8, 0, 2, 1.0, 8),  # synchronous: one batch, whatever admit_ahead says
        (8, 2, 2, 1.0, 24),  # (1 + 2) * 8
        (8, 2, 0, 1.0, 8),
        (8, 2, 5, 1.0, 24),  # admit_ahead counts up to max_staleness
        (8, 2, 1, 1.5, 24),  # (1 + 1) * 8 * 1.5
        (8, 2, 2, 4.0, 24),  # never beyond the window (1 + 2) * 8
        (3, 2, 0, 1.5, 5),  # 4.5 rounds up
    ],
)
def test_target_of_admission(groups_per_step, max_staleness, admit_ahead, oversample_factor, target):
    made = scheduler(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        admit_ahead=admit_ahead,
        oversample_factor=oversample_factor,
    )
    assert made.rules.target == target
    assert len(made.admit()) == target


def test_admission_is_one_round_per_batch():
    made = scheduler(groups_per_step=2)
    assert [admission.group for admission in made.admit()] == [0, 1, 2, 3, 4, 5]
    receive_all(made, 0, 1)
    assert made.admit() == []  # nothing is admitted in mid-batch
    made.commit(made.select(), updated=True)
    assert [(admission.group, admission.version) for admission in made.admit()] == [(6, 1), (7, 1)]


def test_between_a_batch_and_the_next_round_a_replaced_group_makes_room_for_one():
    made = scheduler(groups_per_step=2)
    made.admit()
    receive_all(made, 0, 1)
    made.commit(made.select(), updated=True)
    replacement = made.replace(2)
    assert (replacement.group, replacement.version) == (6, 1)
    assert [admission.group for admission in made.admit()] == [7, 8]


def test_a_batch_without_update_makes_room_at_the_same_version():
    made = scheduler(groups_per_step=2)
    made.admit()
    receive_all(made, 0, 1)
    made.commit(made.select(), updated=False)
    assert (made.version, made.batches) == (0, 1)
    assert [(admission.group, admission.version) for admission in made.admit()] == [(6, 0), (7, 0)]


def test_rows_repeat_in_order():
    assert [admission.row for admission in scheduler(groups_per_step=2, num_rows=4).admit()] == [0, 1, 2, 3, 0, 1]


def test_a_finite_dataset_ends_in_a_short_batch():
    made = scheduler(groups_per_step=2, max_staleness=0, steps=2, num_rows=3, repeat_dataset=False)
    made.admit()
    receive_all(made, 0, 1)
    made.commit(made.select(), updated=True)
    assert [admission.group for admission in made.admit()] == [2]
    made.receive(2)
    assert made.select() == Batch((2,))
    made.commit(made.select(), updated=True)
    assert made.finished
    assert made.admit() == []


# The age boundary


def with_a_slow_group(version: int) -> tuple[Scheduler, int]:
    """A scheduler at `version` whose oldest group was admitted at version 10 and has not been received, and that group.

    Two groups are in flight (admit_ahead 0, oversampled twice): one trains per update, the other may be slow.
    """
    made = scheduler(admit_ahead=0, oversample_factor=2.0)
    for _ in range(10):
        made.admit()
        made.receive(made.batches)
        made.commit(made.select(), updated=True)
    (admission,) = made.admit()
    assert (admission.group, admission.version) == (11, 10)
    while made.version < version:
        made.receive(10 if made.version == 10 else made.admitted - 1)  # the other one
        made.commit(made.select(), updated=True)
        made.admit()
    return made, admission.group


@pytest.mark.parametrize("version", [10, 11, 12])
def test_a_group_admitted_at_version_10_trains_at_10_11_and_12(version):
    made, slow = with_a_slow_group(version)
    assert made.deadline(slow) == 12
    made.receive(slow)
    assert made.select() == Batch((slow,))
    made.commit(made.select(), updated=True)
    assert made.version == version + 1


def test_a_group_admitted_at_version_10_never_trains_at_13():
    made, slow = with_a_slow_group(12)
    other = made.admitted - 1
    made.receive(other)  # ready, and it could train; but then version 13 would come with the slow group outstanding
    assert made.select() == Blocked("bound", slow)
    with pytest.raises(ScheduleError, match="cannot train in time"):
        made.commit(Batch((other,)), updated=True)
    made.receive(slow)
    assert made.select() == Batch((slow,))


def test_step_waits_when_two_groups_share_the_last_update():
    # G = 1, K = 2: groups 0, 1 and 2, admitted at version 0, need the updates from versions 0, 1 and 2: one each.
    made = scheduler()
    made.admit()
    made.receive(2)
    made.commit(made.select(), updated=True)  # 0 and 1 are left, and the updates from versions 1 and 2
    made.admit()
    made.receive(3)  # ready and young; but after it only the update from version 2 would be left for both
    assert made.select() == Blocked("bound", 0)
    made.receive(1)
    assert made.select() == Batch((1,))


def test_a_batch_without_update_is_held_back_all_the_same():
    """Whether a batch holds a gradient is known only once it is chosen, so the test takes it to advance the version."""
    made = scheduler(max_staleness=1)
    made.admit()  # 0, 1 at version 0
    made.receive(1)
    made.commit(made.select(), updated=False)
    made.admit()  # 2 at version 0
    made.receive(2)
    assert made.select() == Batch((2,))  # at version 0 the update from version 1 is still there for group 0
    made.commit(made.select(), updated=True)
    made.admit()  # 3 at version 1
    made.receive(3)
    assert made.select() == Blocked("bound", 0)
    with pytest.raises(ScheduleError, match="cannot train in time"):
        made.commit(Batch((3,)), updated=False)


def test_synchronous_training_never_leaves_a_group_behind():
    made = scheduler(groups_per_step=3, max_staleness=0)
    made.admit()
    receive_all(made, 2, 0)
    assert made.select() == Blocked("ready", 1)
    made.receive(1)
    assert made.select() == Batch((0, 1, 2))
    made.commit(made.select(), updated=True)
    assert made.reserved_groups == 0


# Selection


def test_ready_groups_train_in_admission_order_not_in_order_of_arrival():
    made = scheduler(groups_per_step=2)
    made.admit()
    receive_all(made, 5, 3, 1)
    assert made.select() == Batch((1, 3))


def test_select_changes_nothing():
    made = scheduler(groups_per_step=2)
    made.admit()
    receive_all(made, 5, 3)
    assert made.select() == made.select() == Batch((3, 5))
    assert (made.pending, made.batches, made.reserved_groups) == (2, 0, 6)


def test_admission_order_waits_for_the_head_of_the_line():
    made = scheduler(groups_per_step=2, batch_order="admission")
    made.admit()
    receive_all(made, 1, 2, 3)
    assert made.select() == Blocked("bound", 0)
    assert made.pull_counts_as_wait()
    made.receive(0)
    assert made.select() == Batch((0, 1))


def test_only_a_full_batch_that_is_held_back_counts_as_waiting():
    made = scheduler(groups_per_step=2, max_staleness=0)
    made.admit()
    made.receive(1)
    assert made.select() == Blocked("ready", 0)
    assert not made.pull_counts_as_wait()  # too few groups: plain lack of data
    made.receive(0)
    assert not made.pull_counts_as_wait()  # there is a batch: no pull is needed


def test_reservations_are_those_left_behind_and_their_deadlines():
    made = scheduler(groups_per_step=2, max_staleness=1)
    made.admit()  # 0..3 at version 0
    receive_all(made, 0, 3)
    made.commit(made.select(), updated=True)
    made.admit()  # 4, 5 at version 1
    assert made.reservations() == [(1, 0), (2, 0), (4, 1), (5, 1)]
    assert made.reserved_groups == 4
    assert [made.deadline(group) for group in (0, 1, 4)] == [None, 1, 2]


# keep and mask_span


@pytest.mark.parametrize("stale_policy", ["keep", "mask_span"])
def test_without_a_bound_the_first_to_arrive_train_first(stale_policy):
    made = scheduler(groups_per_step=2, stale_policy=stale_policy)
    made.admit()
    receive_all(made, 5, 1, 3)
    assert made.select() == Batch((5, 1))
    assert made.reservations() == []
    assert made.reserved_groups == 0
    assert made.deadline(0) is None
    made.commit(made.select(), updated=True)
    made.admit()  # 6, 7
    receive_all(made, 7, 6, 2, 4)
    for groups in ((3, 7), (6, 2)):  # group 0, admitted at version 0, holds nobody back
        assert made.select() == Batch(groups)
        assert not made.pull_counts_as_wait()
        made.commit(made.select(), updated=True)
    assert made.version == 3


def test_without_a_bound_a_blocked_batch_names_the_oldest_outstanding_group():
    made = scheduler(groups_per_step=2, stale_policy="keep")
    made.admit()
    made.receive(0)
    assert made.select() == Blocked("ready", 1)
    assert not made.pull_counts_as_wait()


def test_carried_over_parts_fill_a_batch_by_trajectories_and_may_be_split():
    made = scheduler(groups_per_step=2, group_size=3, stale_policy="keep", carry_over=True)
    made.admit()
    made.receive(0, [0, 2], final=False)
    made.receive(1, [0, 1, 2])
    assert made.select() == Blocked("ready", 0)  # five of six trajectories
    made.receive(2, [1, 0], final=False)
    assert made.select() == Batch((0, 1, 2), ((0, 2), (0, 1, 2), (1,)))
    made.commit(made.select(), updated=True)
    made.receive(0, [1])
    made.receive(2, [2])
    made.receive(3, [0, 1, 2])
    assert made.select() == Batch((2, 0, 2, 3), ((0,), (1,), (2,), (0, 1, 2)))


def test_an_empty_final_part_ends_its_group_and_is_no_result():
    made = scheduler(groups_per_step=1, group_size=3, steps=2, stale_policy="keep")
    made.admit()
    made.receive(0, [0, 2], final=False)
    made.receive(0, [], final=True)
    assert made.select() == Batch((0,), ((0, 2),))
    with pytest.raises(ScheduleError, match="not outstanding"):
        made.receive(0, [1])


def test_a_batch_is_short_only_when_nothing_is_outstanding():
    made = scheduler(groups_per_step=2, group_size=2, steps=1, stale_policy="keep", carry_over=True)
    made.admit()
    made.receive(0, [0], final=False)
    made.receive(0, [], final=True)
    assert made.select() == Blocked("ready", 1)
    made.receive(1, [0, 1])
    assert made.select() == Batch((0, 1), ((0,), (0, 1)))


# Misuse


def test_a_group_is_received_once_and_only_after_its_admission():
    made = scheduler()
    with pytest.raises(ScheduleError, match="Group 0 was received, but it is not outstanding"):
        made.receive(0)
    made.admit()
    made.receive(0)
    with pytest.raises(ScheduleError, match="Group 0 was received, but it is not outstanding"):
        made.receive(0)


def test_a_group_trains_once():
    made = scheduler()
    made.admit()
    made.receive(0)
    batch = made.select()
    made.commit(batch, updated=True)
    made.admit()
    with pytest.raises(ScheduleError, match="not 1 ready ones"):
        made.commit(batch, updated=True)


def test_no_batch_of_groups_that_were_not_received():
    made = scheduler()
    made.admit()
    with pytest.raises(ScheduleError, match="not 1 ready ones"):
        made.commit(Batch((0,)), updated=True)


def test_parts_are_refused_under_wait():
    made = scheduler()
    made.admit()
    with pytest.raises(ScheduleError, match="arrived in part"):
        made.receive(0, [0], final=False)


def test_a_member_arrives_once():
    made = scheduler(stale_policy="keep", carry_over=True)
    made.admit()
    made.receive(0, [0], final=False)
    with pytest.raises(ScheduleError, match="twice"):
        made.receive(0, [0, 1])


def test_results_are_not_taken_out_of_turn():
    made = scheduler(stale_policy="keep")
    made.admit()
    receive_all(made, 1, 0)
    with pytest.raises(ScheduleError, match="oldest results"):
        made.commit(Batch((0,)), updated=True)


def test_nothing_is_selected_after_the_last_batch():
    made = scheduler(steps=1)
    made.admit()
    made.receive(0)
    made.commit(made.select(), updated=True)
    assert made.finished
    with pytest.raises(ScheduleError, match="All 1 groups"):
        made.select()


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"groups_per_step": 0},
        {"max_staleness": -1},
        {"oversample_factor": 0.5},
        {"oversample_factor": float("nan")},
        {"stale_policy": "drop"},
        {"batch_order": "random"},
        {"stale_policy": "keep", "batch_order": "admission"},
        {"stale_policy": "mask_span", "repeat_dataset": False, "steps": 1},
        {"carry_over": True},
        {"repeat_dataset": False, "num_rows": 9, "groups_per_step": 4, "steps": 4},
    ],
    ids=str,
)
def test_rules_that_no_run_could_follow_are_refused(wrong):
    with pytest.raises(ConfigError):
        scheduler(**wrong)
