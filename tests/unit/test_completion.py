"""The rule of group completion: when a group closes, whom it stops, what it hands over."""

from pipeline.config import GroupCompletion
from pipeline.rollouts.completion import GROUP_DEADLINE, GROUP_DISCARD, NOTHING, Decision, GroupProgress


def progress(size=4, mode="deadline", min_members=2, on_stragglers="truncate", max_straggler_tokens=5):
    return GroupProgress(
        GroupCompletion(
            mode=mode,
            min_members=min_members,
            on_stragglers=on_stragglers,
            max_straggler_tokens=max_straggler_tokens if mode == "deadline" else None,
        ),
        size,
    )


def start_all(group, size=4):
    for member in range(size):
        assert group.started(member) == NOTHING
    return group


def test_without_a_deadline_the_last_member_hands_over_all():
    group = start_all(progress(mode="wait"))
    for member in (3, 0, 2):
        assert group.ended(member) == NOTHING and group.generated(1, 1000) == NOTHING
    assert group.ended(1) == Decision(emit=(0, 1, 2, 3), final=True) and not group.closed


def test_tokens_count_from_the_end_of_the_min_members_th():
    group = start_all(progress())
    group.generated(2, 100)  # before
    assert group.ended(0) == NOTHING and group.ended(1) == NOTHING
    assert group.generated(2, 4) == NOTHING and group.generated(3, 4) == NOTHING  # counted for each member by itself
    assert group.generated(3, 1) == Decision(stop=(2, 3), cause=GROUP_DEADLINE) and group.closed


def test_members_without_a_request_do_not_close_a_group_but_are_stopped_with_it():
    group = progress(max_straggler_tokens=0)
    group.started(0), group.started(1)
    assert group.ended(0) == NOTHING and group.ended(1) == NOTHING  # nobody else runs yet
    assert group.started(2) == Decision(stop=(2, 3), cause=GROUP_DEADLINE)


def test_zero_tokens_close_it_with_the_min_members_th_end():
    group = start_all(progress(max_straggler_tokens=0))
    assert group.ended(2) == NOTHING
    assert group.ended(1) == Decision(stop=(0, 3), cause=GROUP_DEADLINE)


def test_truncated_stragglers_go_out_with_the_others_in_one_result():
    group = start_all(progress(max_straggler_tokens=0))
    group.ended(2), group.ended(1)
    assert group.generated(0, 9) == NOTHING  # its last request, which was not interrupted
    assert group.ended(3) == NOTHING
    assert group.ended(0) == Decision(emit=(0, 1, 2, 3), final=True)


def test_carried_over_stragglers_go_out_together_at_the_end():
    group = start_all(progress(on_stragglers="carry_over"))
    group.ended(3), group.ended(1)
    assert group.generated(0, 5) == Decision(emit=(1, 3)) and group.closed
    assert group.generated(0, 500) == NOTHING and group.ended(0) == NOTHING
    assert group.ended(2) == Decision(emit=(0, 2), final=True)


def test_discarded_stragglers_leave_an_empty_last_part():
    group = start_all(progress(on_stragglers="discard"))
    group.ended(3), group.ended(1)
    assert group.generated(2, 5) == Decision(emit=(1, 3), stop=(0, 2), cause=GROUP_DISCARD)
    assert group.gone(2) == NOTHING
    assert group.gone(0) == Decision(emit=(), final=True)


def test_a_group_that_ends_before_it_closes_is_whole():
    group = start_all(progress(on_stragglers="carry_over"))
    group.ended(0), group.ended(1), group.generated(2, 4), group.ended(3)
    assert group.ended(2) == Decision(emit=(0, 1, 2, 3), final=True) and not group.closed


def test_as_many_min_members_as_members_never_close_it():
    group = start_all(progress(min_members=4, max_straggler_tokens=0))
    for member in range(3):
        assert group.ended(member) == NOTHING
    assert group.ended(3) == Decision(emit=(0, 1, 2, 3), final=True) and not group.closed


def test_what_a_member_threw_away_counts_nowhere():
    """Of the 7 tokens of member 2 three came after the note; started again, it may add five."""
    group = start_all(progress())
    assert group.generated(2, 4) == NOTHING
    group.ended(0), group.ended(1)
    assert group.generated(2, 3) == NOTHING
    group.starts_again(2)
    assert group.generated(3, 4) == NOTHING
    assert group.started(2) == NOTHING and group.generated(2, 4) == NOTHING
    assert group.generated(2, 1) == Decision(stop=(2, 3), cause=GROUP_DEADLINE)


def test_a_member_that_starts_again_is_not_running_until_it_has_started():
    group = start_all(progress(max_straggler_tokens=0, size=3), size=2)
    group.starts_again(1)
    assert group.ended(0) == NOTHING
    group.gone(2)
    assert group.started(1) == NOTHING  # one has ended
