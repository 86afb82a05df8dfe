"""Rollouts that agents drive: exact ids whatever an agent asks, budgets, and every way to end."""

import asyncio

import pytest

from pipeline.endpoint.chat_request import ChatRequest
from pipeline.endpoint.refusal import Refusal
from pipeline.errors import RunError, TrajectoryError
from tests.unit.played_agent import IDLE, SECONDS_A_REQUEST, PlayedAgent, letters, play, said, user

A, B, C = user("a"), user("b"), user("c")
PROMPT = [*letters(A), 50]
B_FOLLOWS, C_FOLLOWS = [*letters(B), 50], [*letters(C), 50]
LOOK = {"type": "function", "function": {"name": "look"}}


def refused(error):
    return error.value.status, error.value.code


def test_a_request_that_goes_on_is_sampled_behind_the_recorded_ids():
    async def script(agent):
        first = await agent.ask(A)
        second = await agent.ask(A, said(first), B)
        assert second.turn.ids == [2, 0] and second.prompt_tokens == len(PROMPT) + 2 + len(B_FOLLOWS)
        agent.post(0.5, {"steps": 2})
        assert await agent.end() == (None, 0.5)
        assert agent.spans == [
            (0, "prompt", PROMPT),
            (0, "generated", [1, 0]),
            (0, "framing", B_FOLLOWS),
            (0, "generated", [2, 0]),
        ]
        assert agent.begun == 1 and agent.trajectory.num_turns == 2 and agent.trajectory.metrics == {"steps": 2.0}

    play([(1, 0), (2, 0)], script)


def test_an_answer_brings_the_log_probs_and_versions_of_all_its_segments():
    async def script(agent):
        answer = await agent.ask(A)
        assert answer.turn.ids == [1, 2, 3, 0] and answer.stopped
        assert list(answer.logprobs) == [-1.0, -2.0, -3.0, 0.0] and list(answer.versions) == [5, 5, 5, 5]
        assert [limit for _, limit in agent.requests] == [2, 2]

    play([(1, 2), (3, 0)], script, segment_tokens=2)


def test_calls_and_their_results_go_on_too():
    async def script(agent):
        first = await agent.ask(A, tools=[LOOK])
        assert first.finish_reason == "tool_calls" and first.turn.tool_calls[0]["id"] == "call00001"
        result = {"role": "tool", "tool_call_id": "call00001", "content": "r"}
        second = await agent.ask(A, said(first), result, tools=[LOOK])
        assert second.turn.tool_calls[0]["id"] == "call00002"
        assert agent.spans[2] == (0, "framing", [*letters(result), 50])

    play([(9, 0), (9, 0)], script)


def test_any_other_conversation_starts_a_new_run():
    async def script(agent):
        first = await agent.ask(A)
        await agent.ask(B)  # another conversation
        await agent.ask(A, said(first) | {"content": "other words"}, B)  # the model never said that
        await agent.ask(A, tools=[LOOK])  # the same words, with a tool
        whole = [*letters(A), *letters(user("other words")), *letters(B), 50]
        assert [span for span in agent.spans if span[1] == "prompt"] == [
            (0, "prompt", PROMPT),
            (1, "prompt", B_FOLLOWS),
            (2, "prompt", whole),
            (3, "prompt", [60, *PROMPT]),
        ]

    play([(1, 0), (2, 0), (3, 0), (4, 0)], script)


def test_a_branch_begins_with_the_exact_ids_of_where_it_branches():
    async def script(agent):
        first = await agent.ask(A)
        await agent.ask(A, said(first), B)
        await agent.ask(A, said(first), C)  # from an earlier state
        behind_first = [*PROMPT, 1, 0]
        assert agent.spans[4:] == [(1, "prompt", [*behind_first, *C_FOLLOWS]), (1, "generated", [3, 0])]
        fourth = await agent.ask(A, said(first), B)  # once more, what was asked before
        assert agent.spans[6:] == [(2, "prompt", [*behind_first, *B_FOLLOWS]), (2, "generated", [4, 0])]
        await agent.ask(A, said(first), B, said(fourth), C)  # and on from there
        assert agent.spans[8:] == [(2, "framing", C_FOLLOWS), (2, "generated", [5, 0])]

    play([(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)], script)


def test_foreign_words_behind_a_recorded_state_are_framing():
    async def script(agent):
        first = await agent.ask(A)
        foreign = {"role": "assistant", "content": "mine"}
        await agent.ask(A, said(first), B, foreign, C)
        assert agent.spans[2] == (0, "framing", [*letters(B), *letters(foreign), *C_FOLLOWS])

    play([(1, 0), (2, 0)], script)


def test_of_equal_states_the_last_one_counts():
    async def script(agent):
        await agent.ask(A)
        again = await agent.ask(A)  # asked twice, answered alike
        await agent.ask(A, said(again), B)
        assert agent.spans[2:] == [
            (1, "prompt", PROMPT),
            (1, "generated", [1, 0]),
            (1, "framing", B_FOLLOWS),
            (1, "generated", [2, 0]),
        ]

    play([(1, 0), (1, 0), (2, 0)], script)


def test_requests_at_once_are_answered_one_after_another():
    async def script(agent):
        both = await asyncio.gather(agent.ask(A), agent.ask(B))
        assert asyncio.get_running_loop().time() == 2 * SECONDS_A_REQUEST
        assert [answer.turn.ids for answer in both] == [[1, 0], [2, 0]]
        assert agent.spans == [
            (0, "prompt", PROMPT),
            (0, "generated", [1, 0]),
            (1, "prompt", B_FOLLOWS),
            (1, "generated", [2, 0]),
        ]

    play([(1, 0), (2, 0)], script)


def test_a_request_that_nobody_waits_for_any_more_is_not_sampled_and_one_that_has_begun_is_recorded():
    async def script(agent):
        wanted = {"first": True, "second": True}
        first = asyncio.ensure_future(agent.loop.complete(ChatRequest([A], []), lambda: wanted["first"]))
        second = asyncio.ensure_future(agent.loop.complete(ChatRequest([B], []), lambda: wanted["second"]))
        await asyncio.sleep(1.0)
        wanted["first"] = wanted["second"] = False
        await first
        with pytest.raises(Refusal, match="gone"):
            await second
        await agent.ask(A)  # its client asks again: the same prompt, a new run
        assert agent.spans == [
            (0, "prompt", PROMPT),
            (0, "generated", [1, 0]),
            (1, "prompt", PROMPT),
            (1, "generated", [2, 0]),
        ]

    play([(1, 0), (2, 0)], script)


def test_messages_that_cannot_be_rendered_are_refused_and_change_nothing():
    async def script(agent):
        for messages in ((user("!"),), (A,)):
            try:
                first = await agent.ask(*messages)
            except Refusal as refusal:
                assert refusal.code == "invalid_messages" and "template refuses" in str(refusal)
        with pytest.raises(Refusal, match="template refuses"):
            await agent.ask(A, said(first), user("!"))
        await agent.ask(A, said(first), B)
        agent.post(1.0)
        assert await agent.end() == (None, 1.0)
        assert [kind for _, kind, _ in agent.spans] == ["prompt", "generated", "framing", "generated"]

    play([(1, 0), (2, 0)], script)


# --- budgets -------------------------------------------------------------------------------------------------------


def test_the_turns_are_counted():
    async def script(agent):
        first = await agent.ask(A)
        with pytest.raises(Refusal, match="max_turns is 1") as error:
            await agent.ask(A, said(first), B)
        assert refused(error) == (400, "context_length_exceeded")
        agent.post(0.25)
        assert await agent.end() == ("turns", 0.25)

    play([(1, 0)], script, max_turns=1)


def test_a_rollout_that_makes_just_its_last_turn_is_not_truncated():
    async def script(agent):
        await agent.ask(A)
        agent.post(0.25)
        assert await agent.end() == (None, 0.25)

    play([(1, 0)], script, max_turns=1)


def test_generated_tokens_are_counted_over_all_runs():
    async def script(agent):
        await agent.ask(A)
        answer = await agent.ask(B)
        assert answer.finish_reason == "length" and answer.turn.ids == [2, 3]
        with pytest.raises(Refusal, match="generated its 4 tokens") as error:
            await agent.ask(C)
        assert refused(error) == (400, "context_length_exceeded")
        agent.post(1)
        assert await agent.end() == ("generated_tokens", 1.0)
        assert [limit for _, limit in agent.requests] == [4, 2]

    play([(1, 0), (2, 3)], script, max_generated_tokens=4)


def test_a_turn_that_the_context_cuts_ends_by_length():
    async def script(agent):
        answer = await agent.ask(A)
        assert answer.finish_reason == "length" and answer.turn.ids == [1, 2]
        with pytest.raises(Refusal, match="no room"):
            await agent.ask(A, said(answer), B)
        agent.post(1)
        assert await agent.end() == ("context", 1.0)

    play([(1, 2)], script, max_context_tokens=len(PROMPT) + 2)


def test_a_conversation_that_is_too_long_may_be_shortened():
    async def script(agent):
        with pytest.raises(Refusal, match="within 10 tokens") as error:
            await agent.ask(user("a" * 20))
        assert refused(error) == (400, "context_length_exceeded") and agent.trajectory.num_turns == 0
        first = await agent.ask(A)
        with pytest.raises(Refusal, match="within 10 tokens"):
            await agent.ask(A, said(first), user("b" * 20))
        assert agent.trajectory.truncated == "context"
        await agent.ask(A, said(first), B)
        agent.post(1)
        assert await agent.end() == (None, 1.0)

    play([(1, 0), (2, 0)], script, max_context_tokens=10)


def test_a_first_prompt_that_is_too_long_may_be_the_end():
    async def script(agent):
        with pytest.raises(Refusal):
            await agent.ask(user("a" * 20))
        agent.post(0)
        assert await agent.end() == ("context", 0.0) and agent.trajectory.generated_tokens == 0

    play([], script, max_context_tokens=10)


def test_the_turn_cap_is_the_smaller_one_of_request_and_budget():
    async def script(agent):
        for asked in (None, 2, 9):
            answer = await agent.ask(A, turn_cap=asked)
            assert answer.finish_reason == "length"
        agent.post(1)
        assert await agent.end() == (None, 1.0), "a turn that was cut at its cap truncates nothing"
        assert [limit for _, limit in agent.requests] == [3, 2, 3]

    play([(1, 2, 3), (1, 2), (1, 2, 3)], script, max_turn_tokens=3)


# --- the end -------------------------------------------------------------------------------------------------------


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
        assert agent.loop.doing == "queue"
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
        assert agent.loop.doing == "tool"
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
        assert agent.loop.doing == "sampling"
        agent.loop.stop("group_deadline")
        assert await agent.end() == ("group_deadline", 0.0)
        assert (await first).finish_reason == "length"
        with pytest.raises(Refusal, match="ended by group_deadline"):
            await waits
        assert agent.spans[-1] == (0, "generated", [1, 2])

    play([(1, 2)], script, segment_tokens=2)


@pytest.mark.parametrize("begins", [False, True])
def test_discarded_it_leaves_no_reward(begins):
    async def script(agent):
        if begins:
            await agent.ask(A)
        agent.loop.stop("group_discard", discard=begins)
        await agent.end()
        assert agent.loop.discarded and agent.trajectory.reward is None and agent.sessions.is_spent(agent.token)

    play([(1, 0)] if begins else [], script)


def test_stopped_before_its_first_step_it_takes_no_token():
    async def whole():
        agent = PlayedAgent([])
        agent.loop.stop("group_failed", discard=True)
        await agent.loop.run({}, 0)
        assert await agent.sessions.take(0.0) is None

    asyncio.run(whole())
