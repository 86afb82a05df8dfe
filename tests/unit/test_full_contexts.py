"""Case HR27: a history that nearly fills the context. The episode ends there, truncated and counted; no request asks
for nothing, and a reply that was cut for lack of room is never taken for a turn.
"""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from played_rollouts import Played as PlayedRollouts
from played_trajectory import PROMPT, STOP, Environment, Played, go_on

from pipeline.advantages import GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import make_batch
from pipeline.config import Truncation
from pipeline.processes.sampler.sampler_client import SegmentResult

WORD = 7
ROOM = {"max_context_tokens": 64, "max_turns": 10}


class Writing(Played):
    """A model that wants to write turns of these lengths, the stop token included, and stops wherever it is cut."""

    def __init__(self, lengths, environment, **budget):
        super().__init__([], environment, **budget)
        self._lengths = iter(lengths)
        self._left = next(self._lengths)

    def _generate(self, context, max_tokens, generated):
        self.requests.append((list(context), max_tokens, generated))
        returned = min(max_tokens, self._left)
        self._left -= returned
        stopped = self._left == 0
        if stopped:
            self._left = next(self._lengths)
        tokens = [WORD] * (returned - stopped) + [STOP] * stopped
        future = asyncio.get_running_loop().create_future()
        future.set_result(SegmentResult(tokens, [0.0] * returned, 5, 5, 0, stopped, 0.0, 0.0))
        return future

    def turns(self):
        return [argument for call, argument in self.environment.calls if call == "turn"]


def talk(lengths, **budget):
    """A conversation whose environment always answers."""
    return Writing(lengths, Environment([go_on() for _ in lengths]), **budget).run()


def test_the_episode_ends_when_its_history_fills_the_context():
    """3 of the prompt, then 12 a turn with its reply: five turns end at 63, and the sixth has one token of room."""
    played = talk([10] * 10, **ROOM)
    assert [max_tokens for _, max_tokens, _ in played.requests] == [61, 49, 37, 25, 13, 1]
    assert played.outcome == ("context", -1.0)
    assert [(turn["num_tokens"], turn["stopped"]) for turn in played.turns()] == [(10, True)] * 5
    call, argument = played.environment.calls[-1]
    assert call == "truncate" and argument["cause"] == "context"
    assert argument["unseen"] == [{"text": str(WORD), "tool_calls": [], "num_tokens": 1, "stopped": False}]


def test_a_reply_that_leaves_no_room_is_not_appended():
    """3 + 4·14 + 4 tokens: the fifth turn ends at 63, and no reply fits."""
    played = talk([12, 12, 12, 12, 4, 1], **ROOM)
    assert played.outcome == ("context", -1.0)
    assert len(played.turns()) == 5 and played.turns()[-1]["stopped"]
    assert sum(len(tokens) for _, tokens in played.tokens) == 63


def test_a_turn_at_its_cap_is_a_turn_and_no_truncation():
    """The cap says where a turn ends; the environment is told that the model did not end it."""
    played = Writing([9, 9, 9], Environment([go_on()]), max_turn_tokens=1, **ROOM).run()
    assert [(turn["num_tokens"], turn["stopped"]) for turn in played.turns()] == [(1, False)] * 2
    assert played.outcome == (None, 0.5)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=11, max_size=11),
    max_context_tokens=st.integers(len(PROMPT) + 1, 80),
    max_generated_tokens=st.integers(1, 60),
    max_turn_tokens=st.none() | st.integers(1, 12),
    segment_tokens=st.integers(1, 20),
    reserve=st.integers(0, 12),
    caps=st.lists(st.none() | st.integers(1, 12), min_size=11, max_size=11),
)
def test_no_request_asks_for_nothing_and_no_cut_reply_is_a_turn(
    lengths, max_context_tokens, max_generated_tokens, max_turn_tokens, segment_tokens, reserve, caps
):
    reserve = min(reserve, max_context_tokens - 1, max_generated_tokens - 1)
    played = Writing(
        lengths,
        Environment([go_on(cap) for cap in caps]),
        max_turns=10,
        max_context_tokens=max_context_tokens,
        max_generated_tokens=max_generated_tokens,
        max_turn_tokens=max_turn_tokens,
        segment_tokens=segment_tokens,
        final_answer_reserve=reserve,
    ).run()
    for context, max_tokens, generated in played.requests:
        assert 1 <= max_tokens <= min(max_context_tokens - len(context), max_generated_tokens - generated)
    for index, turn in enumerate(played.turns()):
        if not turn["stopped"]:  # then it is as long as it was allowed to be
            # A turn that was cut to ask for the final answer has no cap of the environment's.
            allowed = {max_turn_tokens, *caps[:index]}
            assert turn["num_tokens"] in allowed
    assert sum(len(tokens) for _, tokens in played.tokens) <= max_context_tokens
    assert played.trajectory.num_turns <= 10
    assert played.trajectory.truncated in ("context", "generated_tokens", "turns", "final_answer")
    assert played.calls.count("truncate") == 1 and played.calls[-1] == "truncate"


def test_it_is_counted_in_the_metrics_of_its_batch():
    """Through the real rollouts: of two members one fills its context, the other ends by itself."""
    members = [{"turns": [10] * turns, "tool_ticks": 1} for turns in (10, 2)]
    script = [{"prompt": 3, "priority": 0, "members": members}]
    played = PlayedRollouts(script, completion={"mode": "wait"}, budget=ROOM, concurrency=2)
    ((_, group),) = played.results
    assert [trajectory.truncated for trajectory in group.trajectories] == ["context", None]
    assert group.trajectories[0].num_turns < 10
    assert all(max_tokens > 0 for requests in played.sampler.requests.values() for _, _, max_tokens, _ in requests)
    rules = BatchRules(advantage=GroupCentered(), normalize="token", truncation=Truncation())
    batch = make_batch([group], 0, rules)
    assert batch.metrics["truncated/context"] == 0.5
