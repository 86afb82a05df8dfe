"""One trajectory against a played sampler and a played environment: what is asked, what is kept, how it ends."""

import asyncio

import pytest
from played_trajectory import FRAMING, MORE, PROMPT, STOP, Environment, Played, go_on, segment

from pipeline.errors import TrajectoryError
from pipeline.trajectory import Span
from workers.messages import ToolRecord


def test_one_turn_from_reset_to_reward():
    played = Played([segment(5, 6, STOP)]).run()
    assert played.environment.calls == [
        ("reset", {"row": {"number": 3}, "seed": 77}),
        ("turn", {"text": "5 6 0", "tool_calls": [], "num_tokens": 3, "stopped": True}),
    ]
    assert played.chat.rendered == [("prompt", ["?"], ["look"])]
    assert played.requests == [(PROMPT, 4096, 0)]
    assert played.trajectory.spans == [
        Span("prompt", PROMPT),
        Span("generated", [5, 6, STOP], 5, 5, [-5.0, -6.0, 0.0]),
    ]
    assert played.outcome == (None, 0.5) and played.trajectory.num_turns == 1


def test_turns_alternate_with_framing_and_every_request_carries_all_ids():
    played = Played([segment(9, STOP), segment(6, STOP)], Environment([go_on()])).run()
    assert played.tokens == [
        ("prompt", PROMPT),
        ("generated", [9, STOP]),
        ("framing", FRAMING),
        ("generated", [6, STOP]),
    ]
    context = [*PROMPT, 9, STOP, *FRAMING]
    assert played.requests == [(PROMPT, 4096, 0), (context, 4096, 2)]
    assert played.noted == [([9, STOP], 3), ([6, STOP], 7)]
    assert played.chat.rendered[1] == ("reply", [MORE], [9, STOP])
    assert [call for call in played.environment.calls[1][1]["tool_calls"]] == [
        {"name": "look", "arguments": {}, "error": None, "id": "call00001"}
    ]
    assert played.tools == [ToolRecord("look", 0.25, None)] * 2 and played.trajectory.num_turns == 2


def test_a_reply_is_rendered_after_the_whole_conversation_and_calls_are_counted_over_it():
    played = Played([segment(9, STOP), segment(9, 5, STOP), segment(6, STOP)], Environment([go_on(), go_on()])).run()
    first, second = (
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": number, "type": "function", "function": {"name": "look", "arguments": {}}}],
        }
        for text, number in (("9 0", "call00001"), ("9 5 0", "call00002"))
    )
    assert played.chat.histories == [["?"], ["?", first, MORE]]
    assert played.loop.turns.history == ["?", first, MORE, second, MORE]


def test_a_format_that_rewrites_the_past_starts_a_conditioning_run():
    played = Played([segment(5, STOP), segment(6, STOP)], Environment([go_on()]))
    played.chat.rewrites = True
    played.run()
    assert [(span.kind, span.run) for span in played.trajectory.spans] == [
        ("prompt", 0),
        ("generated", 0),
        ("prompt", 1),
        ("generated", 1),
    ]
    assert played.requests[1] == (FRAMING, 4096, 2), "the new context is what was rendered, and nothing before it"


def test_a_turn_of_several_segments_keeps_each_with_its_version_and_is_parsed_whole():
    played = Played([segment(5, 6, version=5), segment(7, 8, version=6), segment(STOP, version=6)], segment_tokens=2)
    played.run()
    assert played.trajectory.spans[1:] == [
        Span("generated", [5, 6], 5, 5, [-5.0, -6.0]),
        Span("generated", [7, 8], 6, 6, [-7.0, -8.0]),
        Span("generated", [STOP], 6, 6, [0.0]),
    ]
    assert played.requests == [
        (PROMPT, 2, 0),
        ([*PROMPT, 5, 6], 2, 2),
        ([*PROMPT, 5, 6, 7, 8], 2, 4),
    ]
    assert played.environment.calls[1][1] == {"text": "5 6 7 8 0", "tool_calls": [], "num_tokens": 5, "stopped": True}


def test_a_turn_at_its_cap_ends_without_a_stop():
    played = Played([segment(5, 6)], max_turn_tokens=2).run()
    assert played.requests == [(PROMPT, 2, 0)]
    assert played.environment.calls[1][1]["stopped"] is False and played.outcome == (None, 0.5)


def test_the_environments_cap_counts_for_the_next_turn_only():
    environment = Environment([go_on(max_turn_tokens=1), go_on()])
    played = Played([segment(5, 6, 7), segment(8), segment(5, 6, 7)], environment, max_turn_tokens=3).run()
    assert [max_tokens for _, max_tokens, _ in played.requests] == [3, 1, 3]


def test_turns_run_out_after_an_answer_without_calls():
    played = Played([segment(5, STOP), segment(6, STOP)], Environment([go_on(), go_on()]), max_turns=2).run()
    assert played.outcome == ("turns", -1.0)
    assert played.calls == ["reset", "turn", "turn", "truncate"]
    assert played.environment.calls[-1] == ("truncate", {"cause": "turns"})
    assert played.tokens[-1] == ("generated", [6, STOP])  # the last reply is not appended: nobody would read it


def test_calls_of_the_last_turn_are_not_made():
    played = Played([segment(9, STOP)], max_turns=1).run()
    assert (played.outcome, played.calls) == (("turns", -1.0), ["reset", "truncate"])


def test_an_episode_that_ends_in_its_last_turn_has_its_own_reward():
    assert Played([segment(5, STOP)], max_turns=1).run().outcome == (None, 0.5)


def test_generated_tokens_run_out_in_mid_turn():
    played = Played([segment(5, 6), segment(7)], segment_tokens=2, max_generated_tokens=3).run()
    assert [max_tokens for _, max_tokens, _ in played.requests] == [2, 1]
    assert (played.outcome, played.calls) == (("generated_tokens", -1.0), ["reset", "truncate"])
    assert played.tokens[1:] == [("generated", [5, 6]), ("generated", [7])]  # what was sampled stays


def test_generated_tokens_are_counted_over_all_turns():
    played = Played([segment(5, 6, STOP), segment(7)], Environment([go_on()]), max_generated_tokens=4).run()
    assert [max_tokens for _, max_tokens, _ in played.requests] == [4, 1]
    assert played.outcome == ("generated_tokens", -1.0)


def test_a_stop_with_the_last_token_of_the_budget_is_a_natural_end():
    played = Played([segment(5, STOP)], max_generated_tokens=2).run()
    assert played.outcome == (None, 0.5) and played.environment.calls[1][1]["stopped"] is True


def test_context_runs_out_in_mid_turn():
    played = Played([segment(5, 6)], max_context_tokens=5).run()
    assert played.requests == [(PROMPT, 2, 0)]
    assert played.outcome == ("context", -1.0)
    unfinished = {"text": "5 6", "tool_calls": [], "num_tokens": 2, "stopped": False}  # on_truncated sees it too
    assert played.environment.calls[-1] == ("truncate", {"cause": "context", "unseen": [unfinished]})


@pytest.mark.parametrize(("context", "fits"), [(7, False), (8, True)])
def test_a_reply_that_would_fill_the_context_is_not_appended(context, fits):
    """3 of the prompt, 2 of the turn, 2 of framing: 7, and one more to write into."""
    played = Played([segment(5, STOP)] + [segment(STOP)] * fits, Environment([go_on()]), max_context_tokens=context)
    played.run()
    assert (("framing", FRAMING) in played.tokens) == fits
    assert played.outcome == ((None, 0.5) if fits else ("context", -1.0))
    assert len(played.requests) == 1 + fits


def test_a_prompt_that_fills_the_context_is_truncated_before_any_request():
    played = Played([], max_context_tokens=3).run()
    assert (played.requests, played.outcome) == ([], ("context", -1.0))


def test_a_segment_without_tokens_truncates_and_leaves_no_span():
    played = Played([segment(5), segment()], segment_tokens=1).run()
    assert played.outcome == ("empty_sample", -1.0)
    assert played.tokens == [("prompt", PROMPT), ("generated", [5])]
    assert played.noted == [([5], 3)] and played.calls == ["reset", "truncate"]


def test_metrics_of_all_replies_are_summed():
    environment = Environment([go_on(hints=1.0), go_on(hints=2.0, cut=0.5)])
    played = Played([segment(5, STOP), segment(6, STOP), segment(9, STOP)], environment, max_turns=3).run()
    assert played.trajectory.metrics == {"hints": 3.0, "cut": 1.5}


@pytest.mark.parametrize("when", ["reset", "turn"])
def test_failure_of_the_environment_leaves_no_reward(when):
    failure = TrajectoryError("It broke.")
    environment = Environment(reset=failure) if when == "reset" else Environment([failure])
    played = Played([segment(5, STOP)], environment)
    with pytest.raises(TrajectoryError, match="It broke."):
        asyncio.run(played.loop.run({}, 1))
    assert played.outcome == (None, None)
    assert played.begun == (when == "turn")  # nothing is pinned for an environment that did not start


def test_what_it_waits_for_is_told():
    seen, words = {}, []

    class Watched(Environment):
        async def call(self, call, argument):
            seen[call] = played.loop.doing.cause
            words.append(played.loop.doing.words)
            return await super().call(call, argument)

    played = Played([segment(9, STOP)], Watched([go_on()]), max_turns=1)
    generate = played._generate
    played._generate = lambda *request: seen.setdefault("generate", played.loop.doing.cause) and generate(*request)
    assert played.loop.doing.cause == "queue"
    played.run()
    assert seen == {"reset": "tool", "generate": "sampling", "truncate": "reward"}
    assert words == ["reset of its environment", "on_truncated (turns)"]


@pytest.mark.parametrize(
    ("ids", "doing"), [([9, STOP], ("tool", "tool look")), ([5, STOP], ("reward", "on_turn or reward"))]
)
def test_a_turn_without_calls_is_waited_for_as_its_reward(ids, doing):
    seen = {}

    class Watched(Environment):
        async def call(self, call, argument):
            seen[call] = (played.loop.doing.cause, played.loop.doing.words)
            return await super().call(call, argument)

    played = Played([segment(*ids)], Watched())
    played.run()
    assert seen["turn"] == doing
