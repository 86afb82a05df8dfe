"""Trajectories whose environment is lost with its process: they start again, and every token is accounted for."""

import asyncio

import pytest
from played_rollouts import Events, Hosts, Played
from test_rollouts import WAIT, assert_nothing_is_left, group, member

from pipeline.rollouts.completion import GROUP_DEADLINE
from pipeline.rollouts.rollouts import GroupFailed

DOWN_TICKS = 7  # from a loss to the next process


class LosingHosts(Hosts):
    """The only host's process dies at these ticks. fails: the trajectory whose call under way fails it then."""

    def __init__(self, script, *ticks, fails=None):
        super().__init__(script)
        self._ticks = ticks
        self._fails = fails
        self._started = False

    def send(self, client, message):
        loop = asyncio.get_running_loop()
        if not self._started:
            self._started = True
            for tick in self._ticks:
                loop.call_at(tick, self._die, client)
        super().send(client, message)

    def _die(self, client, suspects=()):
        for timer, _ in self._working.values():
            timer.cancel()
        self._working.clear()
        calls = [call for _, call, *_ in client._pending.values()]
        requests = [call.request for call in calls if (call.group, call.member) == self._fails]
        client.lost(0, "it died", dict.fromkeys(requests, "It hung."), suspects)
        asyncio.get_running_loop().call_later(DOWN_TICKS, client.back, 0)


def play(script, *ticks, fails=None, budget=None, completion=WAIT, concurrency=8, **options):
    events = Events()
    played = Played(
        script,
        hosts=LosingHosts(script, *ticks, fails=fails),
        completion=completion,
        budget=budget or {},
        concurrency=concurrency,
        events=events,
        **options,
    )
    generated = sum(event["tokens"] for event in events.of("segment"))
    spent = sum(event["tokens"] for kind in ("retry", "trajectory", "discarded") for event in events.of(kind))
    assert generated == spent or any(isinstance(result, GroupFailed) for _, result in played.results)
    assert_nothing_is_left(played)
    return played, events


def test_a_trajectory_in_a_tool_starts_again_at_once_with_all_its_tokens_thrown_away():
    played, events = play([group(member(2, 3, tool_ticks=50))], 40)
    ((tick, result),) = played.results
    assert [(event["trajectory"], event["attempt"], event["tokens"]) for event in events.of("retry")] == [("0.0", 1, 2)]
    assert tick == 40 + DOWN_TICKS + 20 + 50 + 30 + 50
    assert [len(span.tokens) for span in result.trajectories[0].spans if span.kind == "generated"] == [2, 3]
    assert [event["event"] for event in events.logged] == [
        "started",
        "segment",
        "retry",
        "started",
        "segment",
        "segment",
        "trajectory",
    ]
    assert (played.log.counters.retries, played.log.counters.begun_anew) == (0, 1)


def test_a_running_request_is_let_to_its_end_and_none_follows_it():
    """Lost at 30, in the first request of a turn of three; that one is answered at 40."""
    played, events = play([group(member(12))], 30, budget={"segment_tokens": 4})
    ((tick, result),) = played.results
    assert [event["tokens"] for event in events.of("retry")] == [4]
    assert tick == 40 + 120 and result.trajectories[0].generated_tokens == 12
    assert played.sampler.withdrawn == [(0, 0)]


def test_one_that_is_lost_before_its_first_request_starts_again():
    script = [group(member(1, tool_ticks=5), member(2))]

    class Deaf(LosingHosts):
        def _take(self, client, call):
            if asyncio.get_running_loop().time() > 10:
                super()._take(client, call)

    events = Events()
    played = Played(script, hosts=Deaf(script, 10), completion=WAIT, budget={}, concurrency=8, events=events)
    assert [(event["tokens"], event["attempt"]) for event in events.of("retry")] == [(0, 1)] * 2
    assert len(events.of("started")) == 2 and len(played.results[0][1].trajectories) == 2
    assert_nothing_is_left(played)


def test_it_may_be_lost_again_and_again():
    played, events = play([group(member(2, tool_ticks=50))], 30, 90, 150)
    assert [event["attempt"] for event in events.of("retry")] == [1, 2, 3]
    assert played.results[0][1].trajectories[0].generated_tokens == 2


def test_a_culprit_fails_its_group_and_the_others_are_spared():
    """Group 1's member 0 hangs; of group 0 nothing fails. Thrown-away tokens are none of the failed group's."""
    script = [group(member(3, tool_ticks=50), member(3, tool_ticks=50)) for _ in range(2)]
    played, events = play(script, 40, fails=(1, 0), replace_failed=True)
    results = {result.group: result for _, result in played.results}
    assert isinstance(results[1], GroupFailed) and results[1].cause == "It hung."
    retried = {event["trajectory"]: event["tokens"] for event in events.of("retry")}
    assert {"0.0": 3, "0.1": 3}.items() <= retried.items()
    generated = sum(event["tokens"] for event in events.of("segment") if event["group"] == 1)
    assert results[1].tokens == generated - retried.get("1.1", 0)
    assert [one.generated_tokens for one in results[0].trajectories] == [3, 3]


def test_what_a_new_start_throws_away_does_not_close_its_group():
    """At 20 two have ended and 2 of member 2's tokens are noted; all it adds after its loss at 25 counts anew."""
    completion = {"mode": "deadline", "max_straggler_tokens": 8}
    script = [group(member(1), member(2), member(20))]
    played, events = play(script, 25, budget={"segment_tokens": 4}, completion=completion)
    ((tick, result),) = played.results
    assert [event["tokens"] for event in events.of("retry")] == [4]  # the request that ended at 40
    assert tick == 40 + 80 and result.trajectories[2].truncated == GROUP_DEADLINE
    assert result.trajectories[2].generated_tokens == 8


def play_stopped(stragglers, fails=None, **options):
    """Member 2 waits for its tool when member 3 closes the group at 90, and its process dies right then."""
    script = [group(member(1), member(1), member(2, 2, tool_ticks=1000), member(20))]

    class Slow(LosingHosts):
        def _take(self, client, call):
            if call.call != "truncate":  # which is never answered: the process dies first
                super()._take(client, call)

    events = Events()
    played = Played(
        script,
        hosts=Slow(script, 95, fails=fails),
        completion={"mode": "deadline", "max_straggler_tokens": 8, "on_stragglers": stragglers},
        budget={"segment_tokens": 4},
        concurrency=8,
        events=events,
        **options,
    )
    return played, events


@pytest.mark.parametrize("stragglers", ["truncate", "discard"])
def test_a_straggler_that_is_stopped_and_lost_leaves_nothing(stragglers):
    played, events = play_stopped(stragglers)
    assert events.of("retry") == []
    discarded = {event["trajectory"]: event["tokens"] for event in events.of("discarded")}
    assert discarded["0.2"] == 2
    generated = sum(event["tokens"] for event in events.of("segment"))
    assert generated == sum(event["tokens"] for kind in ("trajectory", "discarded") for event in events.of(kind))
    assert_nothing_is_left(played)


def test_tokens_of_a_failed_group_are_without_those_of_a_straggler_that_was_lost():
    played, events = play_stopped("truncate", fails=(0, 3), replace_failed=True)
    ((_, failed),) = played.results
    assert [(event["trajectory"], event["tokens"]) for event in events.of("discarded")] == [("0.2", 2)]
    assert failed.cause == "It hung."
    assert failed.tokens == sum(event["tokens"] for event in events.of("segment")) - 2
    assert_nothing_is_left(played)


def test_deaths_do_not_count_against_the_next_group_of_that_number():
    """Every evaluation numbers its groups anew."""

    class Suspecting(LosingHosts):
        def _die(self, client):
            suspects = list(client._pending)
            super()._die(client, suspects)

    script = [group(member(2, tool_ticks=50))]
    played = Played(script, hosts=Suspecting(script, 30, 90), completion=WAIT, budget={}, concurrency=8)
    assert played.results[0][1].members == [0]
    assert not played.run.environments._deaths
