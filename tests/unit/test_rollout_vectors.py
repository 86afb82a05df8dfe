"""The rollout vectors: budgets, slots and group completion of the real Rollouts, to the tick."""

import pytest
from played_rollouts import Played

from tests import vectors


def in_order(results):
    return sorted(results, key=lambda one: (one["tick"], one["group"], one["final"]))


@pytest.mark.parametrize("vector", vectors.load("rollout"))
def test_rollouts_follow_the_vector(vector):
    params, expected = vector["params"], vector["expected"]
    played = Played(
        vector["groups"],
        completion=params["completion"],
        budget=params["budget"],
        concurrency=params["concurrency"],
        ticks_per_token=params["ticks_per_token"],
    )
    results = [
        {
            "tick": tick,
            "group": result.group,
            "members": result.members,
            "final": result.final,
            "closed_by_deadline": result.closed_by_deadline,
        }
        for tick, result in played.results
    ]
    assert in_order(results) == in_order(expected["results"])
    starts = {(group, member): tick for tick, group, member, call in played.run.hosts.calls if call == "reset"}
    for want in expected["members"]:
        key = want["group"], want["member"]
        found = played.log.ended[key]
        assert {
            "group": found.group,
            "member": found.member,
            "start_tick": starts[key],
            "truncated": played.log.discarded_by.get(key, found.truncated),
            "turns": found.num_turns,
            "generated_tokens": found.generated_tokens,
            "context_tokens": found.context_tokens,
            "reward": found.reward or 0,
            "requests": played.sampler.requests[key],
        } == want
    assert len(played.log.ended) == len(expected["members"])
