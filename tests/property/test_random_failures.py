"""Groups whose environments fail and are lost with their processes at random, under limits of time and of groups: every
member has an outcome, every token a fate, nobody starts again more often than is allowed, and nothing is left.
"""

import asyncio
import random
from collections import Counter

import pytest

from pipeline.rollouts.running_group import GroupFailed
from tests.unit.open_environments import num_open
from tests.unit.played_rollouts import Events, Hosts, Played
from workers.messages import EnvironmentReplies, EnvironmentReply

MAX_RETRIES = 2
DOWN_TICKS = 7  # from a loss to the next process


class UnrulyHosts(Hosts):
    """A call fails with the probability `failing`; a truncation takes its time; the process dies `deaths` times."""

    def __init__(self, script, dice, failing, deaths):
        super().__init__(script)
        self._dice = dice
        self._failing = failing
        self._deaths = deaths
        self.failures = Counter()  # by (group, member)
        self._started = False

    def send(self, client, message):
        if not self._started:
            self._started = True
            for _ in range(self._deaths):
                asyncio.get_running_loop().call_at(self._dice.randrange(600), self._die, client)
        super().send(client, message)

    def _take(self, client, call):
        loop = asyncio.get_running_loop()
        if call.call == "drop":
            super()._take(client, call)
            for _, other, *_ in list(client._pending.values()):
                if (other.group, other.member) == (call.group, call.member):
                    self._answer(client, other, "interrupted")
        elif self._dice.random() < self._failing:
            working = self._working.pop((call.group, call.member), None)
            if working is not None:  # a truncation that fails: the turn that it interrupts is answered first
                working[0].cancel()
                working[1]({}, "interrupted")
            loop.call_later(self._dice.randrange(60), self._fail, client, call)
        elif call.call == "truncate":
            loop.call_later(self._dice.randrange(60), self._still_take, client, call)
        else:
            super()._take(client, call)

    def _still_take(self, client, call):
        if call.request in client._pending:  # else its process has died
            super()._take(client, call)

    def _fail(self, client, call):
        if call.request in client._pending:
            self.failures[call.group, call.member] += 1
            self._answer(client, call, "It broke.")

    def _answer(self, client, call, error):
        client.receive(EnvironmentReplies([EnvironmentReply(call.request, {}, [], 0.0, error)]))

    def _die(self, client):
        for timer, _ in self._working.values():
            timer.cancel()
        self._working.clear()
        if client._up[0]:
            client.lost(0, "it died", {})
            asyncio.get_running_loop().call_later(DOWN_TICKS, client.back, 0)


def random_script(dice, groups, size):
    def member():
        turns = [dice.randrange(1, 12) for _ in range(dice.randrange(1, 4))]
        return {"turns": turns, "tool_ticks": dice.choice([0, 5, 40, 400]), "reward": dice.random()}

    return [{"prompt": 4, "priority": 0, "members": [member() for _ in range(size)]} for _ in range(groups)]


@pytest.mark.parametrize("seed", range(60))
def test_every_member_has_an_outcome_and_every_token_a_fate(seed):
    dice = random.Random(seed)
    size = dice.randrange(2, 5)
    script = random_script(dice, dice.randrange(1, 4), size)
    deadline = {"mode": "deadline", "min_members": 1, "max_straggler_tokens": dice.choice([0, 3, 8])}
    stragglers = dice.choice(["truncate", "carry_over", "discard"])
    hosts = UnrulyHosts(script, dice, dice.choice([0.0, 0.05, 0.3]), dice.randrange(3))
    events = Events()
    played = Played(
        script,
        hosts=hosts,
        completion=dice.choice([{"mode": "wait"}, deadline | {"on_stragglers": stragglers}]),
        budget={"segment_tokens": dice.choice([2, 4, 16])},
        concurrency=dice.randrange(1, 9),
        events=events,
        max_retries=MAX_RETRIES,
        trajectory_timeout=dice.choice([None, 50.0, 150.0]),
        replace_failed=True,
    )
    check_outcomes(script, size, played, events)
    check_tries(hosts, played, events)
    assert num_open(played.run.environments) == [0] and played.run.slots.num_leases(0) == 0
    # A truncation that came after a turn's end is answered to nobody.
    assert {call.call for _, call, *_ in played.run.environments._pending.values()} <= {"truncate"}
    assert played.sampler.running == 0 and played.sampler.num_trajectories == 0
    assert not played.rollouts._tasks and not played.rollouts._groups
    assert played.log.counters.active == 0 and played.log.counters.inflight == 0


def failed_groups(played):
    return {result.group: result for _, result in played.results if isinstance(result, GroupFailed)}


def check_outcomes(script, size, played, events):
    """Each member of a group that has not failed came out once, or was discarded; the tokens of all add up."""
    failed = failed_groups(played)
    handed_over = [one for _, result in played.results for one in getattr(result, "trajectories", ())]
    came_out = Counter((one.group, one.member) for one in handed_over if one.group not in failed)
    for event in events.of("discarded"):
        if event["group"] not in failed:
            came_out[tuple(map(int, event["trajectory"].split(".")))] += 1
    kept = [group for group in range(len(script)) if group not in failed]
    assert came_out == Counter((group, member) for group in kept for member in range(size))
    for group in range(len(script)):
        tokens = Counter()
        for event in events.logged:
            if event["group"] == group:
                tokens[event["event"]] += event.get("tokens", 0)
        spent = sum(one.generated_tokens for one in handed_over if one.group == group)
        spent += failed[group].tokens if group in failed else 0
        assert tokens["segment"] == tokens["retry"] + tokens["discarded"] + spent


def check_tries(hosts, played, events):
    failed = failed_groups(played)
    retries = events.of("retry")
    counted = Counter(event["trajectory"] for event in retries if event["cause"] != "it died")
    assert all(count <= MAX_RETRIES for count in counted.values())
    counters = played.log.counters
    assert (counters.retries, counters.begun_anew) == (counted.total(), len(retries) - counted.total())
    used_up = f"at its attempt {1 + MAX_RETRIES} (max_retries = {MAX_RETRIES})"
    assert all(used_up in result.cause for result in failed.values())
    for group in failed:
        of_group = [count for name, count in counted.items() if name.startswith(f"{group}.")]
        assert max(of_group) == MAX_RETRIES
    assert played.log.counters.failures <= sum(hosts.failures.values())
