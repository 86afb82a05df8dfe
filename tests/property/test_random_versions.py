"""Random schedules of versions, turns, cut segments, evictions, restarts and dropped versions, with prompts shared in
groups: every segment is proved by recomputation from the versions that it names, under each sampling policy.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from pipeline.config import KVCache
from pipeline.rollouts.version_choice import choose_version
from tests.engine_twin import random_context
from tests.mixed_twin import VERSIONS, Recomputed, make_versions_engine
from workers.generation.engine_requests import EngineRequest


@dataclass
class Trajectory:
    """One trajectory as the supervisor sees it, and what proves its segments."""

    group: int
    member: int
    context: np.ndarray
    turns_left: int
    pinned: int | None = None
    last: int | None = None
    anchor: int | None = None
    generated: int = 0
    asked: EngineRequest | None = None
    proof: Recomputed = field(default_factory=Recomputed)


class RandomRun:
    """Groups that share prompts, versions that are published whenever, little memory, and a sampler that dies."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.policy = policy
        limit = {"trajectory": 0, "hold": 1 + seed // 2 % 2, "refill": seed // 2 % 3}[policy]
        self.kv_tokens = 130 if seed % 2 else 400  # little memory, or enough
        on_limit = {"on_limit": "refill", "allow_reprefill": True} if policy == "refill" else {}
        self.kv_cache = KVCache(max_staleness=limit, **on_limit)
        self.committed, self.requests, self.refreshes, self.dropped = 0, 0, 0, 0
        self.evictions = 0
        self.ages: set[int] = set()  # of the KV under a segment
        self.trajectories: list[Trajectory] = []
        for group in range(2):
            prompt = random_context(self.rng, int(self.rng.integers(3, 20)))
            self.trajectories += [Trajectory(group, member, prompt, 3) for member in range(3)]
        self.restart()

    def restart(self) -> None:
        self.engine = make_versions_engine([], kv_tokens=self.kv_tokens, max_batch_tokens=16)
        self.known: set[int] = set()
        for one in self.trajectories:
            if one.asked is not None:
                self.send(one.asked)

    def send(self, asked: EngineRequest) -> None:
        if asked.version not in self.known:
            self.known.add(asked.version)
            self.engine.set_weights(asked.version, VERSIONS[asked.version])
        self.engine.add(asked)

    def ask(self, one: Trajectory) -> None:
        leased = {other.last for other in self.trajectories if other.last is not None}
        if self.policy == "trajectory":
            one.pinned = self.committed if one.pinned is None else one.pinned
            version = one.pinned
        else:
            resident = sorted({*leased, *range(max(0, self.committed - 2), self.committed + 1)})
            version, rebuilds = choose_version(
                self.kv_cache, committed=self.committed, resident=resident, last=one.last, anchor=one.anchor
            )
            self.refreshes += rebuilds
        most = int(self.rng.integers(1, 7) if self.rng.random() < 0.7 else 30)
        one.asked = EngineRequest(
            self.requests, one.group, one.member, version, one.context, most, one.generated, self.kv_cache.max_staleness
        )
        self.requests += 1
        self.send(one.asked)

    def answer(self, segment) -> None:
        (one,) = [one for one in self.trajectories if one.asked and one.asked.request == segment.request]
        one.proof.prove(one.asked, segment)
        assert one.last is None or segment.version >= one.last
        self.ages.add(segment.version - segment.kv_version)
        one.last, one.anchor, one.asked = segment.version, segment.kv_version, None
        one.generated += len(segment.tokens)
        if self.rng.random() < 0.25:  # the others that run now go on under theirs
            self.committed = min(self.committed + 1, len(VERSIONS) - 1)
        one.context = np.concatenate((one.context, segment.tokens))
        ends_turn = self.rng.random() < 0.5
        if ends_turn:
            one.turns_left -= 1
            one.context = np.concatenate((one.context, random_context(self.rng, int(self.rng.integers(1, 5)))))
            if self.rng.random() < 0.1:  # a rewritten context: shorter, or other tokens from somewhere on
                keep = int(self.rng.integers(1, len(one.context)))
                one.context = np.concatenate((one.context[:keep], random_context(self.rng, 3)))
        if not one.turns_left or len(one.context) > 60:
            self.engine.release(one.group, one.member)
            self.trajectories.remove(one)

    def go(self) -> None:
        for _ in range(5000):
            if not self.trajectories:
                break
            for one in self.trajectories:
                if one.asked is None and self.rng.random() < 0.5:
                    self.ask(one)
            for segment in self.engine.step():
                self.evictions += segment.evictions
                self.dropped += segment.dropped
                self.answer(segment)
            chance = self.rng.random()
            if chance < 0.005:
                self.restart()
            elif chance < 0.06:
                self.drop_versions()
        assert not self.trajectories, "a trajectory never ends"
        assert self.engine._cache.pool.num_free == self.kv_tokens

    def drop_versions(self) -> None:
        """What no request needs goes; `hold` may come back to it, as its slot is there until it is written over."""
        needed = {one.asked.version for one in self.trajectories if one.asked is not None}
        for version in self.known - needed - {self.committed}:
            self.engine.drop_version(version)
            self.known.remove(version)


@pytest.mark.parametrize("policy", ["trajectory", "hold", "refill"])
def test_every_segment_is_what_its_versions_say_whatever_happens(policy):
    ages, refreshes, evictions, dropped = set(), 0, 0, 0
    for seed in range(2 if policy == "trajectory" else 6):
        played = RandomRun(policy, seed)
        played.go()
        assert max(played.ages) <= played.kv_cache.max_staleness
        ages |= played.ages
        refreshes += played.refreshes
        evictions += played.evictions
        dropped += played.dropped
    assert ages == ({0} if policy == "trajectory" else {0, 1, 2})
    assert (refreshes > 0) == (policy == "refill")
    assert evictions > 0
    assert policy != "trajectory" or not dropped
