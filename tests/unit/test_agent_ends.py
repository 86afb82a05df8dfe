"""How rollouts that agents drive end: scored, given up, silent, or stopped by their group."""

import asyncio

import pytest

from pipeline.endpoint.refusal import Refusal
from pipeline.errors import RunError, TrajectoryError
from tests.unit.played_agent import IDLE, SECONDS_A_REQUEST, A, B, PlayedAgent, play, refused


def test_the_token_is_spent_at_the_end_and_the_rollout_is_scored_once():
    async def script(agent):
        await agent.ask(A)
        agent.post(1)
        for again in (lambda: agent.post(2), lambda: agent.loop.give_up("no")):
            with pytest.raises(Refusal) as error:
                again()
            assert refused(error) == (409, "rollout_ended")
        with pytest.raises(Refusal) as error:
            await agent.ask(B)
        assert refused(error) == (400, "rollout_ended")
        assert await agent.end() == (None, 1.0)
        assert agent.sessions.is_spent(agent.token)

    play([(1, 0)], script)


def test_what_is_no_reward_is_refused_and_may_be_corrected():
    async def script(agent):
        await agent.ask(A)
        for reward in (None, "1.0", [1.0], 1e200):
            with pytest.raises(Refusal, match="the reward is") as error:
                agent.post(reward)
            assert error.value.param == "reward"
        for metrics in ([1], {"steps": "2"}, {"steps": None}):
            with pytest.raises(Refusal, match="metric") as error:
                agent.post(1.0, metrics)
            assert error.value.param == "metrics"
        agent.post(True, {"a": 1, "b": False})
        assert await agent.end() == (None, 1.0)
        assert agent.trajectory.metrics == {"a": 1.0, "b": 0.0}

    play([(1, 0)], script)


def test_a_reward_without_any_request_fails_by_a_sentence():
    async def script(agent):
        with pytest.raises(Refusal, match="nothing was sampled"):
            agent.post(1.0)
        with pytest.raises(TrajectoryError, match="Trajectory 4.2 has a reward, but its agent made no request"):
            await agent.end()
        assert agent.begun == 0

    play([], script)


def test_a_reward_that_comes_while_a_turn_is_sampled_waits_for_it():
    async def script(agent):
        await agent.ask(A)
        late = asyncio.ensure_future(agent.ask(B))
        await asyncio.sleep(1.0)
        agent.post(1.0)
        assert await agent.end() == (None, 1.0)
        assert late.done() and agent.spans[-1] == (1, "generated", [2, 0])

    play([(1, 0), (2, 0)], script)


def test_a_reward_may_come_while_the_first_turn_is_sampled():
    async def script(agent):
        late = asyncio.ensure_future(agent.ask(A))  # its client has gone, and the harness scores what there is
        await asyncio.sleep(1.0)
        agent.post(1.0)
        assert await agent.end() == (None, 1.0)
        assert late.done() and agent.spans[-1] == (0, "generated", [1, 0])

    play([(1, 0)], script)


def test_a_scored_rollout_whose_only_turn_was_withdrawn_is_truncated():
    async def script(agent):
        late = asyncio.ensure_future(agent.ask(A))
        await asyncio.sleep(1.0)
        agent.post(1.0)
        agent.loop.stop("group_deadline")
        assert await agent.end() == ("group_deadline", 1.0)
        with pytest.raises(Refusal):
            await late

    play([()], script)


def test_a_harness_that_gives_up_fails_the_trajectory():
    async def script(agent):
        await agent.ask(A)
        agent.loop.give_up("the container is gone")
        with pytest.raises(TrajectoryError, match="gave up trajectory 4.2: the container is gone"):
            await agent.end()
        assert agent.sessions.is_spent(agent.token)

    play([(1, 0)], script)


def test_an_agent_that_is_silent_for_too_long_fails_by_name():
    async def script(agent):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(IDLE - 1.0)
        await agent.ask(A)
        assert not agent.running.done()
        await asyncio.sleep(IDLE - 1.0)
        agent.loop.touch()
        with pytest.raises(TrajectoryError, match="agent of trajectory 4.2 made neither a request nor a reward within"):
            await agent.end()
        assert loop.time() == SECONDS_A_REQUEST + 3 * IDLE - 2.0

    play([(1, 0)], script)


def test_sampling_is_no_silence():
    async def script(agent):
        agent.loop.idle_timeout = SECONDS_A_REQUEST / 2
        await agent.ask(A)
        agent.post(1.0)
        assert await agent.end() == (None, 1.0)

    play([(1, 0)], script)


def test_a_rollout_that_no_harness_asks_for_fails_when_none_is_heard_of():
    async def script(agent):
        await asyncio.sleep(IDLE - 1.0)
        assert agent.loop.doing.cause == "queue"
        agent.sessions.hear()  # of another rollout
        with pytest.raises(TrajectoryError, match="No harness asked for trajectory 4.2, or for anything else, within"):
            await agent.end()
        assert asyncio.get_running_loop().time() == 2 * IDLE - 1.0 and agent.begun == 0

    play([], script, offer_taken=False)


def test_what_breaks_sampling_breaks_the_trajectory():
    async def script(agent):
        async def broken(*request):
            raise RunError("The sampler is gone.")

        agent._generate = broken
        with pytest.raises(RunError, match="sampler is gone"):
            await agent.ask(A)
        with pytest.raises(RunError, match="sampler is gone"):
            await agent.end()

    play([], script)


# --- stopped by its group ------------------------------------------------------------------------------------------


def test_stopped_between_requests_it_ends_now_unscored():
    async def script(agent):
        await agent.ask(A)
        assert agent.loop.doing.cause == "tool"
        agent.loop.stop("group_deadline")
        with pytest.raises(Refusal, match="ended by group_deadline") as error:
            await agent.ask(B)
        assert refused(error) == (400, "rollout_ended")
        with pytest.raises(Refusal) as error:
            agent.post(1.0)
        assert refused(error) == (409, "rollout_ended")
        assert await agent.end() == ("group_deadline", 0.0)
        assert asyncio.get_running_loop().time() == SECONDS_A_REQUEST

    play([(1, 0)], script)


def test_stopped_while_it_samples_it_finishes_that_request_only():
    async def script(agent):
        first, waits = (asyncio.ensure_future(agent.ask(A)) for _ in range(2))
        await asyncio.sleep(1.0)
        assert agent.loop.doing.cause == "sampling"
        agent.loop.stop("group_deadline")
        assert await agent.end() == ("group_deadline", 0.0)
        assert (await first).finish_reason == "length"
        with pytest.raises(Refusal, match="ended by group_deadline"):
            await waits
        assert agent.spans[-1] == (0, "generated", [1, 2])

    play([(1, 2)], script, segment_tokens=2)


def test_stopped_before_its_request_has_left_it_is_refused():
    async def script(agent):
        first = asyncio.ensure_future(agent.ask(A))
        await asyncio.sleep(1.0)
        agent.loop.stop("group_deadline")  # the sampler is told so, and answers with nothing
        with pytest.raises(Refusal, match="ended by group_deadline"):
            await first
        assert await agent.end() == ("group_deadline", 0.0)

    play([()], script)


def test_a_sampler_that_gives_nothing_truncates():
    async def script(agent):
        with pytest.raises(Refusal, match="The sampler gave no token"):
            await agent.ask(A)
        agent.post(0.5)
        assert await agent.end() == ("empty_sample", 0.5)

    play([()], script)


@pytest.mark.parametrize("begins", [False, True])
def test_discarded_it_leaves_no_reward(begins):
    async def script(agent):
        if begins:
            await agent.ask(A)
        agent.loop.stop("group_discard", discard=begins)
        await agent.end()
        assert agent.loop.discarded and agent.trajectory.reward is None and agent.sessions.is_spent(agent.token)

    play([(1, 0)] if begins else [], script)


@pytest.mark.parametrize(("value", "says"), [(b"raw", "bytes"), (float("nan"), "Out of range float")])
def test_a_row_that_is_no_json_is_named(value, says):
    async def whole():
        agent = PlayedAgent([])
        with pytest.raises(TrajectoryError, match=f"row of trajectory 4.2 can't be sent to a harness as JSON.*{says}"):
            await agent.loop.run({"value": value}, 0)

    asyncio.run(whole())


def test_stopped_before_its_first_step_it_takes_no_token():
    async def whole():
        agent = PlayedAgent([])
        agent.loop.stop("group_failed", discard=True)
        await agent.loop.run({}, 0)
        assert await agent.sessions.take(0.0) is None

    asyncio.run(whole())
