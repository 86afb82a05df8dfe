"""Agents that Headway calls itself: what becomes of their rollout when the call returns, raises or is lost."""

import asyncio

import pytest

from pipeline.endpoint.refusal import Refusal
from pipeline.errors import TrajectoryError
from pipeline.processes.environment.environment_handle import EnvironmentLost
from tests.unit.played_agent import IDLE, play, user
from workers.messages import EnvironmentReply

A = user("a")


class Called:
    """In the place of an environment's handle: its turn ends as the test says."""

    def __init__(self, starts_after=0.0):
        self.calls = []
        self.dropped = False
        self._starts_after = starts_after
        self.returned = None  # a future

    async def call(self, call, argument):
        self.calls.append((call, argument))
        if call == "reset":
            await asyncio.sleep(self._starts_after)
            self.returned = asyncio.get_running_loop().create_future()
            return EnvironmentReply(1, {"messages": []}, [], 0.0, None)
        return EnvironmentReply(2, await self.returned, [], 0.0, None)

    def drop(self):
        self.dropped = True


def play_called(segments, script, starts_after=0.0, **budget):
    environment = Called(starts_after)

    async def started(agent):
        return await script(agent, environment)

    return play(segments, started, environment=environment, offer_taken=False, **budget)


async def called(environment):
    while environment.returned is None:
        await asyncio.sleep(0.1)
    return environment.returned


def test_what_the_call_returns_ends_the_rollout():
    async def script(agent, environment):
        returned = await called(environment)
        (_, told), (call, _) = environment.calls
        assert told["row"]["row"] == {"n": 5} and told["row"]["base_url"] == "http://here/v1" and call == "turn"
        assert agent.sessions.find(told["row"]["api_key"]).driven is agent.loop and agent.loop.doing.cause == "tool"
        await agent.ask(A)
        with pytest.raises(Refusal, match="returns its reward; post none"):
            agent.post(1.0)
        returned.set_result({"messages": None, "reward": 0.5, "metrics": {"steps": 2.0}})
        assert await agent.end() == (None, 0.5) and agent.trajectory.metrics == {"steps": 2.0}
        assert agent.sessions.is_spent(told["row"]["api_key"])

    play_called([(1, 0)], script)


def test_what_it_raises_fails_the_rollout():
    async def script(agent, environment):
        returned = await called(environment)
        await agent.ask(A)
        returned.set_exception(TrajectoryError("it has lost its way"))
        with pytest.raises(TrajectoryError, match="lost its way"):
            await agent.end()

    play_called([(1, 0)], script)


def test_what_it_raises_when_no_budget_is_left_is_a_truncation():
    async def script(agent, environment):
        returned = await called(environment)
        await agent.ask(A)
        with pytest.raises(Refusal, match="max_turns is 1"):
            await agent.ask(A)
        returned.set_exception(TrajectoryError("BadRequestError: no budget"))
        assert await agent.end() == ("turns", 0.0)

    play_called([(1, 0)], script, max_turns=1)


def test_a_reward_without_a_request_fails():
    async def script(agent, environment):
        (await called(environment)).set_result({"messages": None, "reward": 0.5})
        with pytest.raises(TrajectoryError, match="its agent made no request, so nothing was sampled"):
            await agent.end()

    play_called([], script)


def test_a_lost_process_starts_the_rollout_again():
    async def script(agent, environment):
        returned = await called(environment)
        await agent.ask(A)
        returned.set_exception(EnvironmentLost("the process is gone"))
        with pytest.raises(EnvironmentLost):
            await agent.end()
        assert agent.sessions.is_spent(environment.calls[0][1]["row"]["api_key"])

    play_called([(1, 0)], script)


def test_its_silence_counts_from_its_call():
    async def script(agent, environment):
        with pytest.raises(TrajectoryError, match="neither made a request nor returned a reward within"):
            await agent.end()
        assert asyncio.get_running_loop().time() == pytest.approx(5 * IDLE + IDLE)
        agent.loop.close()
        assert environment.dropped

    play_called([], script, starts_after=5 * IDLE)
