"""The gate's rule against a slow oracle that plays the remaining updates one by one."""

from itertools import combinations_with_replacement

import numpy as np
import pytest

from shm.gate import first_blocker, fits, refusal


def all_train_in_time(owed, next_version, groups_per_update, max_staleness):
    """Slow oracle: from `next_version` on, each update trains the oldest groups; does any miss its deadline?"""
    waiting, version = sorted(owed), next_version
    while waiting:
        now, waiting = waiting[:groups_per_update], waiting[groups_per_update:]
        if any(version > admitted + max_staleness for admitted in now):
            return False
        version += 1
    return True


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("groups_per_update", [1, 2, 3])
def test_gate_and_invariant_agree_with_the_oracle_in_every_small_case(groups_per_update, max_staleness):
    version, outcomes = 5, set()
    for num_owed in range(7):
        for owed in combinations_with_replacement(range(version - max_staleness - 1, version + 1), num_owed):
            blocker = first_blocker(owed, version, groups_per_update, max_staleness)
            assert (blocker is None) == all_train_in_time(owed, version + 1, groups_per_update, max_staleness), owed
            fit = fits(owed, version, groups_per_update, max_staleness)
            assert fit == all_train_in_time(owed, version, groups_per_update, max_staleness), owed
            outcomes.add((blocker is None, fit))
    assert outcomes == ({(True, True), (False, True), (False, False)})


def test_step_waits_when_two_groups_share_the_last_update():
    # Version 10, age 2, one group an update: both groups may train at 11 at the latest (9 + 2), and only one can.
    assert first_blocker([9], 10, 1, 2) is None
    assert first_blocker([9, 9], 10, 1, 2) == 1
    assert first_blocker([9, 9], 10, 2, 2) is None


def test_synchronous_training_leaves_nobody_behind():
    assert first_blocker([], 3, 4, 0) is None
    assert first_blocker([3], 3, 4, 0) == 0
    assert fits([3, 3, 3, 3], 3, 4, 0)
    assert not fits([3, 3, 3, 3, 3], 3, 4, 0)


def test_the_order_in_which_groups_are_named_does_not_matter():
    assert first_blocker([10, 8, 9], 9, 1, 2) == first_blocker([8, 9, 10], 9, 1, 2)
    assert (
        first_blocker([10, 8], 10, 1, 2) == 0
    )  # rank 0 is the oldest, the one admitted at 8: its last update is this one


def ask(**changes):
    question = {"versions": [8, 9, 10], "left_behind": [(7, 10)], "from_version": 10}
    return refusal(**(question | {"groups_per_update": 2, "max_staleness": 2} | changes))


def test_a_safe_step_is_allowed():
    assert ask() is None
    assert ask(versions=[], left_behind=[]) is None
    assert ask(versions=np.array([8, 8, 10], dtype=np.int32)) is None


def test_version_10_at_age_2_trains_up_to_version_12_and_never_at_13():
    for version in (10, 11, 12):
        assert ask(versions=[10], left_behind=[], from_version=version) is None
    why = ask(versions=[13, 10], left_behind=[], from_version=13)
    assert "policy version 10" in why and "3 updates old at version 13" in why and "allows 2" in why


@pytest.mark.parametrize("versions", [[11], [10, 11]])
def test_a_segment_from_the_future_is_refused(versions):
    assert "policy version 11, newer than the learner's version 10" in ask(versions=versions)


def test_a_version_below_zero_is_refused_even_at_an_age_that_would_be_allowed():
    assert "policy version -1" in ask(versions=[-1], left_behind=[], from_version=0)


def test_refusal_names_the_group_that_would_come_too_late():
    # 12 and 31 take the one update (2 groups) that is left for groups admitted at 9; 40 would miss it.
    why = ask(left_behind=[(40, 9), (12, 9), (50, 10), (31, 9)])
    assert why.startswith("Group 40, admitted at version 9 and number 3 ")
    assert "only 1 updates of 2 groups" in why


def test_a_group_past_its_deadline_is_refused():
    assert ask(left_behind=[(3, 7)]).startswith("Group 3, admitted at version 7 and number 1 ")


def test_a_reservation_of_a_version_not_yet_committed_is_refused():
    assert ask(left_behind=[(3, 11), (4, 9)]).startswith("Group 3 is reserved as admitted at version 11")


def test_segments_that_weigh_nothing_may_be_old_and_never_new():
    assert ask(versions=[9, 10], weightless=[0, 7]) is None  # mask_span
    assert "policy version 7, which is 3 updates old" in ask(versions=[7], weightless=[0])
    assert "policy version 11, newer than" in ask(weightless=[11])


def test_without_a_bound_only_segments_from_the_future_are_refused():
    assert ask(versions=[0, 10], left_behind=[], max_staleness=None) is None  # keep
    assert "policy version 11, newer than" in ask(versions=[11], left_behind=[], max_staleness=None)
    assert "policy version -1" in ask(versions=[-1], left_behind=[], max_staleness=None)
