"""Rollouts that agents drive, in groups: concurrency, leases and deadlines hold as for environments."""

import asyncio
from types import SimpleNamespace

import pytest

from pipeline.chat.format import ParsedTurn
from pipeline.config import Budget, GroupCompletion
from pipeline.endpoint.chat_request import ChatRequest
from pipeline.endpoint.refusal import Refusal
from pipeline.endpoint.sessions import Sessions
from pipeline.rollouts.rollouts import RolloutRules, Rollouts
from pipeline.rollouts.running_group import GroupFailed
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.schedule import Admission
from pipeline.trainer_config import EngineConfig
from tests import virtual_clock
from tests.unit.played_rollouts import Chat, Log, Run

IDLE = 100_000.0
ASK = {"role": "user", "content": "?"}


class CountingChat(Chat):
    """A prompt of three tokens."""

    def render_prompt(self, messages, tools):
        return [0] * 3

    def parse_turn(self, turn_ids):
        return ParsedTurn(f"{len(turn_ids)} words", [])


class Played:
    """Groups of two, whose agents the test plays; a turn takes as many tokens as `turns` says, ten ticks each."""

    def __init__(self, turns, max_retries=0, trajectory_timeout=None, **options):
        script = [{"priority": 0, "members": [{"turns": list(turns)}] * 2} for _ in range(2)]
        self.run = Run(script, 10, 1000, None)
        self.sessions = Sessions(asyncio.get_running_loop().time)
        self.run.endpoint = SimpleNamespace(
            sessions=self.sessions, calls_agents=False, base_url="http://here/v1", idle_timeout=IDLE
        )
        self.log = Log(None, SamplingCounters())
        options = {"concurrency": 4} | options
        rows = [{"n": 0}, {"n": 1}]
        config = EngineConfig(
            budget=Budget(segment_tokens=8), max_retries=max_retries, trajectory_timeout=trajectory_timeout
        )
        self.rollouts = Rollouts(config, self.run, CountingChat(), rows, 2, self.log, RolloutRules(**options))

    def admit(self, *groups):
        self.rollouts.start([Admission(group, group, 0) for group in groups])

    async def take(self):
        taken = await self.sessions.take(0.0)
        return None if taken is None else taken[0]

    @property
    def leases(self):
        groups = self.rollouts._groups.values()
        return sum(requests.leased is not None for group in groups for requests in group.requests.values())


async def ask(session, *messages):
    return await session.driven.complete(ChatRequest(list(messages or [ASK]), []), lambda: True)


def play(script, turns=(4, 4), **options):
    async def whole():
        played = Played(turns, **options)
        played.admit(0, 1)
        await asyncio.sleep(0)
        await script(played)
        await played.rollouts.stop()

    virtual_clock.run(whole())


def test_concurrency_bounds_the_rollouts_that_are_offered_and_waiting_ones_hold_no_lease():
    async def script(played):
        taken = [await played.take() for _ in range(4)]
        assert [one.offer["trajectory"] for one in taken[:3]] == ["0.0", "0.1", "1.0"] and taken[3] is None
        assert [one.offer["row"] for one in taken[:3]] == [{"n": 0}, {"n": 0}, {"n": 1}]
        assert len({one.offer["seed"] for one in taken[:3]}) == 3
        assert played.leases == 0 and played.rollouts.holding_oldest() is None
        assert played.rollouts.doing(0)[:2] == ("0.0", "tool") and played.rollouts.doing(1)[:2] == ("1.0", "tool")
        await ask(taken[0])
        assert played.leases == 1 and played.rollouts.holding_oldest()[:2] == ("0.0", "tool")
        taken[0].driven.score(1.0, None)
        await asyncio.sleep(1.0)
        assert played.leases == 0 and (await played.take()).offer["trajectory"] == "1.1"

    play(script, concurrency=3)


def test_a_group_goes_out_with_its_last_reward():
    async def script(played):
        assert played.rollouts.doing(0)[:2] == ("0.0", "queue")
        taken = [await played.take() for _ in range(4)]
        for index, session in enumerate(taken):
            await ask(session)
            session.driven.score(index, None)
        groups = [await played.rollouts.completed.get() for _ in range(2)]
        assert [[one.reward for one in group.trajectories] for group in groups] == [[0.0, 1.0], [2.0, 3.0]]
        assert all(one.generated_tokens == 4 for group in groups for one in group.trajectories)

    play(script)


def test_a_deadline_ends_the_straggler_with_its_running_request():
    async def script(played):
        first, second = await played.take(), await played.take()
        await asyncio.gather(ask(first), ask(second))
        first.driven.score(1.0, None)  # from now on, the other member may add two tokens
        late = asyncio.ensure_future(ask(second))
        group = await played.rollouts.completed.get()
        assert group.closed_by_deadline and [one.truncated for one in group.trajectories] == [None, "group_deadline"]
        assert [one.reward for one in group.trajectories] == [1.0, 0.0]
        assert group.trajectories[1].generated_tokens == 4 + 8, "its request came to its end, and none followed"
        assert (await late).finish_reason == "length" and played.leases == 0
        with pytest.raises(Refusal, match="ended by group_deadline"):
            await ask(second)

    completion = GroupCompletion(mode="deadline", min_members=1, max_straggler_tokens=2)
    play(script, turns=(4, 20), completion=completion)


def test_one_that_fails_fails_its_group_and_frees_the_others_agent():
    async def script(played):
        first, second = await played.take(), await played.take()
        await ask(first)
        await ask(second)
        second.driven.give_up("no more")
        result = await played.rollouts.completed.get()
        assert isinstance(result, GroupFailed) and "gave up trajectory 0.1: no more" in result.cause
        assert result.tokens == 8 and played.leases == 0
        with pytest.raises(Refusal, match="ended by group_failed"):
            await ask(first)

    play(script, replace_failed=True)


def test_silence_ends_the_run_by_name():
    async def script(played):
        await played.take()
        error = await played.rollouts.completed.get()
        assert "The agent of trajectory 0.0 made neither a request nor a reward within" in str(error)

    play(script)


def test_one_that_is_given_up_is_offered_again_and_what_it_had_is_thrown_away():
    async def script(played):
        first, second = await played.take(), await played.take()
        await ask(second)
        second.driven.give_up("not this time")
        await asyncio.sleep(1.0)
        for _ in range(2):  # group 1's
            await played.take()
        again = await played.take()
        assert again.offer == second.offer and again is not second and again.number > second.number
        with pytest.raises(Refusal, match="has ended"):
            await ask(second)
        for session in (first, again):
            await ask(session)
            session.driven.score(1.0, None)
        group = await played.rollouts.completed.get()
        assert [one.generated_tokens for one in group.trajectories] == [4, 4]
        assert (played.log.counters.failures, played.log.counters.retries) == (1, 1)

    play(script, max_retries=1)


def test_one_that_takes_too_long_is_truncated_from_its_first_request_on():
    async def script(played):
        first, second = await played.take(), await played.take()
        await asyncio.sleep(1000.0)  # neither has asked for anything
        await ask(first)
        await ask(second)
        second.driven.score(1.0, None)
        group = await played.rollouts.completed.get()
        assert [one.truncated for one in group.trajectories] == ["trajectory_timeout", None]
        assert [one.reward for one in group.trajectories] == [0.0, 1.0]
        assert asyncio.get_running_loop().time() == pytest.approx(1000.0 + 500.0, abs=1e-6)
        with pytest.raises(Refusal, match="ended by trajectory_timeout"):
            await ask(first)
        assert played.leases == 0

    play(script, trajectory_timeout=500.0)


def test_without_any_harness_nothing_is_tried_again():
    async def script(played):
        error = await played.rollouts.completed.get()
        assert "No harness asked for trajectory 0.0" in str(error) and played.log.counters.retries == 0
        assert asyncio.get_running_loop().time() == pytest.approx(IDLE, abs=1.0)

    play(script, max_retries=2)
