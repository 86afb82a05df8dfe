"""Rollouts that agents drive: exact ids whatever an agent asks, within its budget."""

import asyncio
from dataclasses import replace

import pytest

from pipeline.chat.format import Rendered
from pipeline.endpoint.chat_request import ChatRequest
from pipeline.endpoint.refusal import Refusal
from tests.unit.played_agent import SECONDS_A_REQUEST, A, B, C, LetterChat, letters, play, refused, said, user

PROMPT = [*letters(A), 50]
B_FOLLOWS, C_FOLLOWS = [*letters(B), 50], [*letters(C), 50]
LOOK = {"type": "function", "function": {"name": "look"}}


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


def test_each_segment_has_its_own_version_and_the_first_says_what_was_cached():
    async def script(agent):
        first, second = agent._segments
        agent._segments = [replace(first, version=5, cached=3), replace(second, version=6, cached=8)]
        answer = await agent.ask(A)
        assert list(answer.versions) == [5, 5, 6, 6] and answer.cached_tokens == 3

    play([(1, 2), (3, 0)], script, segment_tokens=2)


def test_a_state_of_another_run_with_as_many_tokens_is_another_state():
    async def script(agent):
        first = await agent.ask(A)
        await agent.ask(B)
        await agent.ask(A, said(first), C)
        assert agent.spans[-2:] == [(2, "prompt", [*PROMPT, 1, 0, *C_FOLLOWS]), (2, "generated", [3, 0])]

    play([(1, 0), (2, 0), (3, 0)], script)


def test_a_branch_that_the_template_writes_in_another_way_is_rendered_whole():
    class Rewriting(LetterChat):
        def render_reply(self, history, turn, messages, tools):
            return Rendered(self._rendered([*history, *messages]), rewrites=True)

    async def script(agent):
        first = await agent.ask(A)
        await agent.ask(B)
        await agent.ask(A, said(first), C)
        assert agent.spans[-2] == (2, "prompt", [*letters(A), *letters(C), 50])

    play([(1, 0), (2, 0), (3, 0)], script, chat=Rewriting())


def test_a_run_that_began_with_other_tools_goes_on_with_them():
    class Telling(LetterChat):
        def render_reply(self, history, turn, messages, tools):
            return Rendered([60] * len(tools) + self._rendered(messages))

    async def script(agent):
        await agent.ask(A)
        second = await agent.ask(B, tools=[LOOK])
        await agent.ask(B, said(second), C, tools=[LOOK])
        assert agent.spans[-2] == (1, "framing", [60, *C_FOLLOWS])

    play([(1, 0), (2, 0), (3, 0)], script, chat=Telling())


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
