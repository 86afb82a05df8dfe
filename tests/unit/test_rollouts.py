"""Rollouts on a virtual clock: who gets a place when, what a deadline does, what a failed group leaves behind."""

import asyncio

import pytest
from open_environments import num_open
from played_rollouts import Hosts, Played

from pipeline.config import Schedule
from pipeline.errors import TrajectoryError
from pipeline.rollouts.rollouts import GroupFailed
from pipeline.trajectory import Group
from workers.messages import EnvironmentReplies, EnvironmentReply

WAIT = {"mode": "wait"}


def member(*turns, tool_ticks=0):
    return {"turns": list(turns), "tool_ticks": tool_ticks}


def group(*members, priority=0):
    return {"priority": priority, "prompt": 3, "members": list(members)}


def starts(played):
    """(tick, group, member) of every environment's reset, in order."""
    return [(tick, one, who) for tick, one, who, call in played.run.hosts.calls if call == "reset"]


def assert_nothing_is_left(played):
    """No environment, lease, request, place or queue entry."""
    assert num_open(played.run.environments) == [0] and not played.run.environments._pending
    assert played.run.slots.num_leases(0) == 0
    assert played.sampler.running == 0 and played.sampler.num_trajectories == 0
    assert not played.rollouts._groups and not played.rollouts._tasks
    assert played.log.counters.active == 0 and played.log.counters.inflight == 0


def test_a_place_is_held_through_tools():
    """One trajectory at a time: the second starts when the first one's tool is done, not when it stops sampling."""
    played = Played([group(member(2, 1, tool_ticks=50))] * 2, completion=WAIT, budget={}, concurrency=1)
    assert starts(played) == [(0, 0, 0), (130, 1, 0)]  # 20 + 50 + 10 + 50 ticks
    assert_nothing_is_left(played)


def test_places_go_to_the_oldest_version_then_in_order_of_admission():
    script = [group(member(3), priority=1), group(member(1), priority=1), group(member(1), priority=0)]
    played = Played(script, completion=WAIT, budget={}, concurrency=1)
    assert [one for _, one, _ in starts(played)] == [0, 2, 1]  # 0 was there first


def test_without_deadlines_places_go_in_order_of_admission():
    script = [group(member(3), priority=1), group(member(1), priority=1), group(member(1), priority=0)]
    played = Played(script, completion=WAIT, budget={}, concurrency=1, oldest_first=False)
    assert [one for _, one, _ in starts(played)] == [0, 1, 2]


def test_the_longest_expected_come_first_within_a_version():
    """Rows 0 and 1 have trained before, with 1 and 4 tokens; row 2 is new: it is expected to have their mean."""
    script = [group(member(1)), group(member(4))]
    script += [group(member(1), priority=1) for _ in range(3)] + [group(member(1), priority=0)]
    rows = [0, 1, 0, 1, 2, 0]
    played = Played(
        script,
        completion=WAIT,
        budget={},
        concurrency=1,
        schedule=Schedule(priority="predicted_length"),
        rows=rows,
        second_round=2,
    )
    assert [one for _, one, _ in starts(played)] == [0, 1, 5, 3, 4, 2]


def test_without_deadlines_too_lengths_are_compared_within_a_version_only():
    """Under keep and mask_span: else a short row would wait for ever behind the longer ones of each newer version."""
    script = [group(member(1)), group(member(4)), group(member(9), priority=2)]
    script += [group(member(1), priority=3), group(member(1), priority=4)]
    played = Played(
        script,
        completion=WAIT,
        budget={},
        concurrency=1,
        schedule=Schedule(priority="predicted_length"),
        rows=[0, 1, 0, 0, 1],
        second_round=2,
        oldest_first=False,
    )
    assert [one for _, one, _ in starts(played)] == [0, 1, 2, 3, 4]


def test_a_deadline_cuts_a_wait_for_a_tool():
    script = [group(member(1), member(1), member(5), member(2, 2, tool_ticks=1000))]
    played = Played(
        script, completion={"mode": "deadline", "max_straggler_tokens": 3}, budget={"segment_tokens": 4}, concurrency=8
    )
    ((tick, result),) = played.results
    # Two have ended at 10; member 2 adds 4 tokens with its request that ends at 40, while member 3 waits for its tool.
    assert tick == 40 and result.closed_by_deadline
    assert [one.truncated for one in result.trajectories] == [None, None, "group_deadline", "group_deadline"]
    assert [one.generated_tokens for one in result.trajectories] == [1, 1, 4, 2]
    assert_nothing_is_left(played)


def test_all_that_ends_in_the_tick_of_the_closing_is_counted_before_anything_follows():
    """At 60 member 2's second turn ends, and right after it the request of member 3 whose tokens close the group."""
    script = [group(member(1), member(1), member(1, 4, 1, tool_ticks=10), member(6, 1))]
    played = Played(
        script, completion={"mode": "deadline", "max_straggler_tokens": 6}, budget={"segment_tokens": 4}, concurrency=8
    )
    ((tick, result),) = played.results
    assert tick == 60 and [one.generated_tokens for one in result.trajectories] == [1, 1, 5, 6]
    turns = [at for at, _, who, call in played.run.hosts.calls if (who, call) == (2, "turn")]
    assert turns == [10]  # no environment follows its second turn
    assert_nothing_is_left(played)


@pytest.mark.parametrize("stragglers", ["truncate", "discard"])
def test_members_that_never_had_a_place_are_left_out(stragglers):
    """Two places: member 3 still waits for one when the end of member 1 closes the group."""
    script = [group(member(1), member(2), member(9), member(9)), group(member(1), member(1), member(1), member(1))]
    played = Played(
        script,
        completion={"mode": "deadline", "max_straggler_tokens": 0, "on_stragglers": stragglers},
        budget={"segment_tokens": 4},
        concurrency=2,
    )
    results = [result for _, result in played.results if result.group == 0]
    assert sorted(who for result in results for who in result.members) == (
        [0, 1, 2] if stragglers == "truncate" else [0, 1]
    )
    assert (0, 3) not in [(one, who) for _, one, who in starts(played)]
    assert played.log.discarded_by.get((0, 3)) == f"group_{'deadline' if stragglers == 'truncate' else 'discard'}"
    assert played.log.ended[0, 3].spans == []
    assert_nothing_is_left(played)


def test_carried_over_members_that_never_had_a_place_still_run():
    script = [group(member(1), member(1), member(9), member(2))]
    played = Played(
        script,
        completion={"mode": "deadline", "max_straggler_tokens": 0, "on_stragglers": "carry_over"},
        budget={},
        concurrency=2,
    )
    assert [(result.members, result.final) for _, result in played.results] == [([0, 1], False), ([2, 3], True)]


class FailingHosts(Hosts):
    """The environment of one member raises in its first turn."""

    def __init__(self, script, fails):
        super().__init__(script)
        self._fails = fails

    def _take(self, client, call):
        if call.call == "turn" and (call.group, call.member) == self._fails:
            reply = EnvironmentReply(call.request, {}, [], 0.0, "It broke.")
            asyncio.get_running_loop().call_soon(client.receive, EnvironmentReplies([reply]))
        else:
            super()._take(client, call)


def failing(script, fails, **options):
    return Played(
        script,
        hosts=FailingHosts(script, fails),
        completion=options.pop("completion", WAIT),
        budget={"segment_tokens": 8},
        replace_failed=True,
        **options,
    )


def test_a_failed_group_ends_alone_and_leaves_nothing():
    """Of its members one samples, one waits for a tool and one for a place when another one fails."""
    script = [
        group(member(20), member(2, 2, tool_ticks=500), member(3), member(1)),
        group(member(1), member(1), member(1), member(1)),
    ]
    played = failing(script, (0, 2), concurrency=3)
    (failed_at, failed), (_, whole) = sorted(played.results, key=lambda one: one[1].group)
    assert isinstance(failed, GroupFailed) and failed.cause == "It broke."
    assert failed_at == 80  # at 30 member 2 fails; member 0's request of 8 tokens, which is not interrupted, ends at 80
    assert failed.tokens == 8 + 2 + 3
    assert played.sampler.withdrawn == [(0, 0), (0, 1)]
    assert isinstance(whole, Group) and whole.members == [0, 1, 2, 3]
    assert (0, 3) not in [(one, who) for _, one, who in starts(played)]
    assert_nothing_is_left(played)


def test_tokens_of_a_failed_group_are_without_those_handed_over():
    script = [group(member(1), member(1), member(20), member(2))]
    completion = {"mode": "deadline", "max_straggler_tokens": 0, "on_stragglers": "carry_over"}
    played = failing(script, (0, 3), completion=completion, concurrency=4)
    (_, part), (_, failed) = played.results
    assert (part.members, part.final) == ([0, 1], False)
    assert failed.tokens == 8 + 2
    assert_nothing_is_left(played)


def test_two_failures_in_one_tick_fail_the_group_once():
    script = [group(member(2), member(2))]

    class Both(FailingHosts):
        def _take(self, client, call):
            self._fails = (call.group, call.member)
            super()._take(client, call)

    played = Played(script, hosts=Both(script, None), completion=WAIT, budget={}, concurrency=2, replace_failed=True)
    ((_, failed),) = played.results
    assert failed.tokens == 4
    assert_nothing_is_left(played)


def test_without_replacement_a_failure_ends_the_run():
    script = [group(member(2), member(9))]
    with pytest.raises(TrajectoryError, match="It broke."):
        Played(script, hosts=FailingHosts(script, (0, 0)), completion=WAIT, budget={}, concurrency=2)


def environment_seeds(seed):
    """By (group, member), of a run with this seed."""
    found = {}

    class Noting(Hosts):
        def _take(self, client, call):
            if call.call == "reset":
                found[call.group, call.member] = call.argument["seed"]
            super()._take(client, call)

    script = [group(member(1), member(1)) for _ in range(2)]
    Played(script, hosts=Noting(script), completion=WAIT, budget={}, concurrency=4, seed=seed)
    return found


def test_environments_have_seeds_of_their_own_that_follow_from_the_runs():
    first, again, other = environment_seeds(1), environment_seeds(1), environment_seeds(2)
    assert first == again and len(first) == 4
    assert len({*first.values(), *other.values()}) == 8
