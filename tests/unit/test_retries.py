"""Trajectories that fail start again, as often as `max_retries` says; those that take too long are truncated."""

import asyncio

import pytest
from played_rollouts import Events, Hosts, Played
from test_rollouts import WAIT, assert_nothing_is_left, group, member

from pipeline.errors import HopelessError, TrajectoryError
from pipeline.rollouts.completion import GROUP_DEADLINE
from pipeline.rollouts.running_group import GroupFailed
from pipeline.rollouts.trajectory_loop import TRAJECTORY_TIMEOUT
from workers.messages import EnvironmentReplies, EnvironmentReply


class Failing(Hosts):
    """A call of one trajectory's environment fails at its first `times` attempts, and is lost to nobody. result: of its
    replies.
    """

    def __init__(self, script, who, times, call="turn", result=None):
        super().__init__(script)
        self._who, self._times, self._call, self._result = who, times, call, result or {}

    def _take(self, client, call):
        if (call.group, call.member) == self._who and call.call == self._call and self._times:
            self._times -= 1
            reply = EnvironmentReply(call.request, self._result, [], 0.0, "It broke.")
            asyncio.get_running_loop().call_soon(client.receive, EnvironmentReplies([reply]))
        else:
            super()._take(client, call)


def play(script, hosts, *, completion=WAIT, budget=None, concurrency=8, **options):
    """The run with its events, in which every token has a fate."""
    events = Events()
    played = Played(
        script,
        hosts=hosts,
        completion=completion,
        budget=budget or {},
        concurrency=concurrency,
        events=events,
        replace_failed=True,
        **options,
    )
    spent = sum(event["tokens"] for kind in ("retry", "trajectory", "discarded") for event in events.of(kind))
    spent += sum(result.tokens for _, result in played.results if isinstance(result, GroupFailed))
    failed = {result.group for _, result in played.results if isinstance(result, GroupFailed)}
    spent -= sum(event["tokens"] for event in events.of("trajectory") if event["group"] in failed)
    assert sum(event["tokens"] for event in events.of("segment")) == spent
    assert_nothing_is_left(played)
    return played, events


@pytest.mark.parametrize(
    ("times", "call", "thrown_away"), [(1, "turn", [2]), (2, "turn", [2, 2]), (2, "reset", [0, 0])]
)
def test_one_that_fails_starts_again_under_its_reservation(times, call, thrown_away):
    script = [group(member(2, 3, tool_ticks=50), member(4))]
    played, events = play(script, Failing(script, (0, 0), times, call), max_retries=2)
    ((_, result),) = played.results
    retries = events.of("retry")
    assert [(event["trajectory"], event["cause"], event["tokens"]) for event in retries] == [
        ("0.0", "It broke.", tokens) for tokens in thrown_away
    ]
    assert [event["attempt"] for event in retries] == list(range(1, times + 1))
    assert [event["failures"] for event in retries] == list(range(1, times + 1))
    assert [one.generated_tokens for one in result.trajectories] == [5, 4] and result.version == script[0]["priority"]
    assert [event["trajectory"] for event in events.of("started")].count("0.1") == 1
    counters = played.log.counters
    assert (counters.failures, counters.retries, counters.timeouts) == (times, times, 0)


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_its_group_fails_when_it_has_started_again_often_enough(max_retries):
    script = [group(member(2), member(30)), group(member(1), member(1))]
    played, events = play(script, Failing(script, (0, 0), 9), max_retries=max_retries)
    results = {result.group: result for _, result in played.results}
    suffix = f", at its attempt {1 + max_retries} (max_retries = {max_retries})" if max_retries else "."
    assert results[0].cause == f"It broke{suffix}"
    assert len(events.of("retry")) == max_retries and {e["trajectory"] for e in events.of("retry")} <= {"0.0"}
    assert results[1].members == [0, 1] and not results[0].took_too_long
    assert played.log.counters.failures == 1 + max_retries


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_group_that_failed_for_taking_too_long_says_so(max_retries):
    script = [group(member(2), member(30))]
    played, _ = play(script, Failing(script, (0, 0), 9, result={"timed_out": True}), max_retries=max_retries)
    ((_, result),) = played.results
    assert result.took_too_long and played.log.counters.timeouts == 1 + max_retries


def test_the_run_ends_with_the_last_error_if_failures_stop_it():
    script = [group(member(2), member(9))]
    with pytest.raises(TrajectoryError, match=r"It broke, at its attempt 3 \(max_retries = 2\)"):
        Played(script, hosts=Failing(script, (0, 0), 9), completion=WAIT, budget={}, concurrency=2, max_retries=2)


def test_one_that_would_only_do_harm_again_is_not_tried_again():
    class Hopeless(Hosts):
        """What a client tells of one whose group has brought three processes down."""

        def _take(self, client, call):
            if (call.group, call.member, call.call) == (0, 0, "turn"):
                client._pending.pop(call.request)[0].set_exception(HopelessError("It was there at 3 deaths."))
            else:
                super()._take(client, call)

    script = [group(member(2), member(30)), group(member(1), member(1))]
    played, events = play(script, Hopeless(script), max_retries=2)
    results = {result.group: result for _, result in played.results}
    assert results[0].cause == "It was there at 3 deaths." and events.of("retry") == []
    assert results[1].members == [0, 1]


def test_each_member_has_tries_of_its_own():
    script = [group(member(2), member(3))]

    class Both(Failing):
        """Each fails twice."""

        def _take(self, client, call):
            if call.call == "turn":
                self._who, tried = (call.group, call.member), self.tried.setdefault(call.member, 0)
                self._times = int(tried < 2)
                self.tried[call.member] += 1
            super()._take(client, call)

        tried = {}  # noqa: RUF012

    played, events = play(script, Both(script, None, 0), max_retries=2)
    assert sorted(event["trajectory"] for event in events.of("retry")) == ["0.0", "0.0", "0.1", "0.1"]
    assert played.results[0][1].members == [0, 1]


def test_one_that_fails_for_its_group_was_closed_gets_as_many_tokens_again():
    """Member 2's on_truncated fails when the group is closed; then it is stopped 8 tokens into a new start."""
    completion = {"mode": "deadline", "max_straggler_tokens": 8}
    script = [group(member(1), member(2), member(40))]
    hosts = Failing(script, (0, 2), 1, "truncate")
    played, events = play(script, hosts, completion=completion, budget={"segment_tokens": 4}, max_retries=1)
    ((_, result),) = played.results
    assert len(events.of("retry")) == 1 and result.closed_by_deadline
    assert result.trajectories[2].truncated == GROUP_DEADLINE and result.trajectories[2].generated_tokens == 8


# --- trajectory_timeout --------------------------------------------------------------------------------------------


def test_a_tool_is_interrupted_when_the_time_is_over_and_the_trajectory_is_scored():
    script = [group(member(2, 2, tool_ticks=10_000), member(3, tool_ticks=10))]
    played, events = play(script, Hosts(script), trajectory_timeout=100.0)
    ((tick, result),) = played.results
    assert tick == 100
    assert [one.truncated for one in result.trajectories] == [TRAJECTORY_TIMEOUT, None]
    assert [one.reward for one in result.trajectories] == [0.0, 1.0]
    assert (0, 0, "truncate") in [call[1:] for call in played.run.hosts.calls] and events.of("retry") == []


def test_a_running_request_is_let_to_its_end_and_none_follows():
    script = [group(member(40))]
    played, _ = play(script, Hosts(script), trajectory_timeout=50.0, budget={"segment_tokens": 8})
    ((tick, result),) = played.results
    assert tick == 80 and result.trajectories[0].truncated == TRAJECTORY_TIMEOUT
    assert result.trajectories[0].generated_tokens == 8 and played.sampler.withdrawn == [(0, 0)]


def test_time_in_the_queue_does_not_count():
    script = [group(member(9)), group(member(9))]
    played, _ = play(script, Hosts(script), trajectory_timeout=100.0, concurrency=1)
    assert [tick for tick, _ in played.results] == [90, 180]
    assert all(result.trajectories[0].truncated is None for _, result in played.results)


def test_time_runs_from_the_first_request_and_anew_for_each_attempt():
    """Reset takes until 200; the turn is sampled in 20, fails at 70, is sampled again until 90."""

    class Late(Failing):
        def _take(self, client, call):
            loop = asyncio.get_running_loop()
            if call.call == "reset" and loop.time() < 200:
                loop.call_at(200, self._take, client, call)
            else:
                super()._take(client, call)

    script = [group(member(2, tool_ticks=50))]
    played, events = play(script, Late(script, (0, 0), 1, "turn"), trajectory_timeout=75.0, max_retries=1)
    ((tick, result),) = played.results
    assert tick == 200 + 20 + 20 + 50 and result.trajectories[0].truncated is None and len(events.of("retry")) == 1


class Deliberate(Hosts):
    """Takes 200 ticks to begin a truncation of member 2; `truncations` are the causes of those."""

    def __init__(self, script):
        super().__init__(script)
        self.truncations = []

    def _take(self, client, call):
        if call.call == "truncate" and call.member == 2:
            self.truncations.append(call.argument["cause"])
            asyncio.get_running_loop().call_later(200, super()._take, client, call)
        else:
            super()._take(client, call)


@pytest.mark.parametrize(("timeout", "cause"), [(95.0, TRAJECTORY_TIMEOUT), (105.0, GROUP_DEADLINE)])
def test_who_comes_first_of_time_and_group_stops_a_trajectory_and_nobody_does_again(timeout, cause):
    """Member 3, which starts at 10, closes the group at 100, while member 2 is in a tool."""
    script = [group(member(1), member(1), member(2, 2, tool_ticks=10_000), member(10))]
    hosts = Deliberate(script)
    played, _ = play(
        script,
        hosts,
        completion={"mode": "deadline", "max_straggler_tokens": 8},
        budget={"segment_tokens": 9},
        concurrency=3,
        trajectory_timeout=timeout,
    )
    ((tick, result),) = played.results
    assert hosts.truncations == [cause] and tick == min(timeout, 100) + 200
    assert result.closed_by_deadline
    assert [one.truncated for one in result.trajectories] == [None, None, cause, GROUP_DEADLINE]
