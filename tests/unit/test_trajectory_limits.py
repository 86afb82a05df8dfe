"""A trajectory's last answer, rewritten context, cut tool results and the stop from outside, on a played sampler."""

import asyncio

import pytest
from played_trajectory import FRAMING, MORE, PROMPT, STOP, Environment, Played, go_on, segment

from pipeline.trajectory import Span


def turn(text, num_tokens, stopped):
    return {"text": text, "tool_calls": [], "num_tokens": num_tokens, "stopped": stopped}


def test_a_reply_near_the_reserve_asks_for_the_final_answer():
    """12 tokens may be generated; 5 are kept back, and a request has 4: at 9 left or fewer it is time to ask."""
    played = Played(
        [segment(2, STOP), segment(2, STOP), segment(2, 2, 2, STOP)],
        Environment([go_on(), go_on()]),
        max_generated_tokens=12,
        segment_tokens=4,
        final_answer_reserve=5,
    ).run()
    assert [max_tokens for _, max_tokens, _ in played.requests] == [4, 4, 4]  # the third may use the reserve
    assert [rendered for rendered in played.chat.rendered[1:]] == [
        ("reply", [MORE], [2, STOP]),  # 10 left
        ("reply", [MORE], [2, STOP]),  # 8 left
        ("reply", [MORE, "now!"], [2, STOP]),
    ]
    assert "unseen" not in played.environment.calls[2][1]
    assert played.environment.calls[3] == ("turn", turn("2 2 2 0", 4, True) | {"unseen": [{"messages": ["now!"]}]})
    assert played.outcome == (None, 0.5)


def test_a_turn_that_reaches_the_reserve_is_cut_and_asked_for_the_final_answer():
    played = Played(
        [segment(2, 3, 4, 5), segment(6, 7, 8), segment(2, STOP)],
        max_generated_tokens=12,
        segment_tokens=4,
        final_answer_reserve=5,
    ).run()
    assert [max_tokens for _, max_tokens, _ in played.requests] == [4, 3, 4]
    assert played.tokens[-2:] == [("framing", FRAMING), ("generated", [2, STOP])]
    assert played.chat.rendered[1] == ("reply", ["now!"], [2, 3, 4, 5, 6, 7, 8])
    assert played.calls == ["reset", "turn"]  # nobody was asked in between
    assert played.environment.calls[1][1]["unseen"] == [turn("2 3 4 5 6 7 8", 7, False), {"messages": ["now!"]}]
    assert played.trajectory.num_turns == 2 and played.outcome == (None, 0.5)


def test_the_final_answer_is_asked_for_once():
    played = Played(
        [segment(2, 2, 2), segment(2, 2, 2, 2), segment(2)],
        max_generated_tokens=8,
        segment_tokens=4,
        final_answer_reserve=5,
    ).run()
    assert played.outcome == ("generated_tokens", -1.0)
    assert [kind for kind, *_ in played.chat.rendered] == ["prompt", "reply"]


def test_in_the_last_turn_the_model_writes_on_into_the_reserve():
    played = Played(
        [segment(2, 2, 2, 2), segment(2, 2, 2), segment(2, STOP)],
        max_turns=1,
        max_generated_tokens=12,
        segment_tokens=4,
        final_answer_reserve=5,
    ).run()
    assert [max_tokens for _, max_tokens, _ in played.requests] == [4, 3, 4]
    assert played.outcome == (None, 0.5) and played.trajectory.num_turns == 1


def test_a_turn_at_its_cap_goes_to_the_environment_even_if_it_reaches_the_reserve():
    played = Played(
        [segment(2, 2, 2)], max_turn_tokens=3, max_generated_tokens=8, segment_tokens=4, final_answer_reserve=5
    ).run()
    assert played.calls == ["reset", "turn"] and played.outcome == (None, 0.5)


@pytest.mark.parametrize("max_turns", [2, 8])
@pytest.mark.parametrize("last", [(2, STOP), (9, STOP)])
def test_after_the_final_answer_no_turn_follows(last, max_turns):
    """Neither for a reply nor for tool calls (9), which are not made; `final_answer` goes before `turns`."""
    played = Played(
        [segment(2, 2, STOP), segment(*last)],
        Environment([go_on(), go_on()]),
        max_turns=max_turns,
        max_generated_tokens=12,
        segment_tokens=4,
        final_answer_reserve=5,
    ).run()
    assert played.outcome == ("final_answer", -1.0)
    assert played.calls == ["reset", "turn", "truncate"] if last[0] == 9 else ["reset", "turn", "turn", "truncate"]
    unseen = played.environment.calls[-1][1].get("unseen", [])
    assert [one["text"] for one in unseen if "text" in one] == (["9 0"] if last[0] == 9 else [])


@pytest.mark.parametrize(("context", "fits"), [(12, False), (13, True)])
def test_a_wrap_up_that_would_fill_the_context_is_not_appended(context, fits):
    """3 of the prompt, 7 of the turn, 2 of the wrap-up."""
    reserve = context - 10
    played = Played(
        [segment(2, 2, 2, 2, 2, 2, 2)] + [segment(STOP)] * fits,
        max_context_tokens=context,
        final_answer_reserve=reserve,
    ).run()
    assert played.outcome == ((None, 0.5) if fits else ("context", -1.0))
    assert (("framing", FRAMING) in played.tokens) == fits


def test_a_rewritten_context_starts_a_run_of_its_own():
    rewritten = {"messages": [MORE], "rewrites": True, "max_turn_tokens": None}
    played = Played([segment(5, STOP), segment(6, STOP)], Environment([rewritten]), max_generated_tokens=4).run()
    assert played.trajectory.spans == [
        Span("prompt", PROMPT),
        Span("generated", [5, STOP], 5, 5, [-5.0, 0.0]),
        Span("prompt", PROMPT, run=1),
        Span("generated", [6, STOP], 5, 5, [-6.0, 0.0], run=1),
    ]
    assert played.chat.rendered[1] == ("prompt", [MORE], ["look"])
    assert played.requests == [(PROMPT, 4, 0), (PROMPT, 2, 2)]  # generated counts all runs, the context this one
    assert played.trajectory.context_tokens == 5


def test_a_rewrite_makes_room_in_a_full_context():
    rewritten = {"messages": [MORE], "rewrites": True, "max_turn_tokens": None}
    played = Played([segment(5, 6, STOP), segment(STOP)], Environment([rewritten]), max_context_tokens=6).run()
    assert played.outcome == (None, 0.5) and played.trajectory.run == 1


def test_where_training_ends_is_kept():
    reply = go_on() | {"loss_mask_end": 2}
    played = Played([segment(5, STOP), segment(STOP)], Environment([reply])).run()
    assert played.trajectory.loss_mask_end == 2


def test_tool_results_are_cut_at_their_budget():
    results = [{"role": "tool", "content": text} for text in ("abcdef", "abc")]
    results.append({"role": "tool", "content": "abc", "cut": True})  # by the environment's process
    reply = {"messages": [*results, MORE], "max_turn_tokens": None}
    played = Played([segment(9, STOP), segment(STOP)], Environment([reply]), tool_output_tokens=3).run()
    _, messages, _ = played.chat.rendered[1]
    assert [message["content"] for message in messages] == ["abc~", "abc", "abc~", "more"]
    assert played.num_cut == 2


class Stoppable(Environment):
    """Notes how it is ended from outside."""

    def interrupt(self, cause):
        self.calls.append(("interrupt", cause))

    def drop(self):
        self.calls.append(("drop", None))


def stopped_in_request(discard, *ids):
    played = Played([segment(*ids)], Stoppable())
    generate = played._generate

    def stop_while_sampling(*request):
        played.loop.stop("group_deadline", discard=discard)
        return generate(*request)

    played._generate = stop_while_sampling
    return played.run()


def test_a_stop_lets_the_request_end_and_the_environment_only_score():
    played = stopped_in_request(False, 2, STOP)
    assert played.environment.calls[1:] == [("truncate", {"cause": "group_deadline", "unseen": [turn("2 0", 2, True)]})]
    assert played.outcome == ("group_deadline", -1.0) and played.trajectory.generated_tokens == 2


def test_a_stop_is_the_cause_of_a_request_that_was_taken_back():
    """It brings no tokens, and is no empty sample of the model's."""
    assert stopped_in_request(False).outcome == ("group_deadline", -1.0)


def test_a_discarded_trajectory_ends_with_its_request_and_asks_nobody():
    played = stopped_in_request(True, 2, STOP)
    assert played.calls == ["reset"] and played.outcome == ("group_deadline", None)
    assert played.loop.discarded and played.trajectory.generated_tokens == 2


def test_a_trajectory_that_is_stopped_before_its_first_request_is_discarded():
    played = Played([], Stoppable())
    played.loop.stop("group_deadline")
    asyncio.run(played.loop.run({}, 1))
    assert played.loop.discarded and played.calls == ["drop"] and played.begun == 0
