"""What a model writes, through a whole trajectory: a played sampler emits it, a real environment host answers, and the
rollout goes on by rule with the ids as they were sampled.
"""

import asyncio
import json
from pathlib import Path

import pytest
from played_trajectory import STOP, Played, segment

from pipeline.chat.format import Rendered
from pipeline.chat.tool_formats import FORMATS
from pipeline.env import Env, tool
from pipeline.environments.host import EnvironmentHost
from workers.messages import EnvironmentCall

CASES = json.loads((Path(__file__).parent.parent / "data" / "cases" / "HR71" / "tool_calls.json").read_text("utf-8"))
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class Sums(Env):
    """Adds; remembers what ran, in the order in which it ended."""

    ran: list

    @tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        for _ in range(10 - a):  # the larger a, the sooner it is done
            await asyncio.sleep(0)
        self.ran.append((a, b))
        return str(a + b)

    def reset(self, row):
        return "How much?"

    def reward(self, traj, row):
        return 1.0 if traj.text == "done" else 0.0


class Letters:
    """One id per character (its code point + 1; 0 stops), so that a model can be made to write anything."""

    vocab_size, stop_ids = 0x110001, (STOP,)

    def __init__(self, family):
        self._family = FORMATS[family]

    def render_prompt(self, messages, tools):
        return ids_of("".join(message["content"] for message in messages))

    def render_reply(self, history, turn, messages, tools):
        return Rendered(ids_of("".join(f"\n{message['content']}\n" for message in messages)))

    def cut(self, text, max_tokens, already):
        return text[:max_tokens]

    def parse_turn(self, turn_ids):
        return self._family.parse("".join(chr(index - 1) for index in turn_ids if index != STOP))


def ids_of(text):
    return [ord(letter) + 1 for letter in text]


class HostEnvironment:
    """The environment host in the place of a trajectory's handle."""

    def __init__(self, env_class):
        self.calls = []
        self.host = EnvironmentHost(env_class, timeout=60.0, name=env_class.__name__)

    async def call(self, call, argument):
        self.calls.append((call, argument))
        reply = await self.host.handle(EnvironmentCall(len(self.calls), 4, 2, call, argument))
        assert reply.error is None, reply.error
        return reply


def play(*turns, family="hermes", **budget):
    """The model writes `turns`, each ended by the stop id; returns the played loop and what the tool ran."""

    class Fresh(Sums):
        ran = []

    segments = [segment(*ids_of(text), STOP) for text in turns]
    played = Played(segments, HostEnvironment(Fresh), Letters(family), max_context_tokens=100_000, **budget).run()
    generated = [span for span in played.trajectory.spans if span.kind == "generated"]
    assert [span.tokens for span in generated] == [one.tokens for one in segments]
    assert [span.logprobs for span in generated] == [one.logprobs for one in segments]
    return played, Fresh.ran


def answers(played):
    """What the model read after its turns."""
    spans = [span for span in played.trajectory.spans if span.kind == "framing"]
    return ["".join(chr(index - 1) for index in span.tokens).strip("\n") for span in spans]


# Line by line of the case's file: what ran, and what the model reads.
EXPECTED = [
    ([(1, 2)], "3"),
    ([], "(Expecting value)"),
    ([], "it ends without </tool_call>"),
    ([], "follows its JSON without </tool_call>"),
    ([(1, 2)], "3"),
    ([], "its arguments are [1, 2], not an object"),
    ([], "there is no tool 'addadd'; the tools: add"),
    ([], "it is null, not an object"),
    ([], "its JSON is wrong at its start"),
    ([], "Expecting property name enclosed in double quotes"),
    ([], "the number 1e999 is too large"),
    ([], "argument 'a' of add is '</tool_call>'; it must be an integer"),
    ([], "it nests lists and objects more than 64 deep"),
]


@pytest.mark.parametrize(("case", "expected"), list(zip(CASES, EXPECTED, strict=True)), ids=range(1, len(CASES) + 1))
def test_every_line_of_the_case_is_answered_and_the_rollout_goes_on(case, expected):
    played, ran = play(case["raw"], "done")
    expected_runs, says = expected
    assert ran == expected_runs
    (answer,) = answers(played)
    assert says in answer
    assert answer.startswith("error: ") == (not expected_runs)
    assert played.outcome == (None, 1.0) and played.trajectory.num_turns == 2
    (record,) = played.tools
    assert (record.error is None) == bool(expected_runs)


def test_calls_of_a_turn_run_together_and_are_answered_in_their_order():
    calls = "".join(ADD.replace("1", str(a)) for a in (1, 9, 5))
    played, ran = play(f"All at once.{calls}", "done")
    assert ran == [(9, 2), (5, 2), (1, 2)]  # as they end: none waits for another
    assert answers(played) == ["3\n\n11\n\n7"]
    assert played.environment.calls[1][1]["text"] == "All at once."


def test_a_malformed_call_among_others_is_answered_in_its_place():
    played, ran = play(f"{ADD}<tool_call>{{oh</tool_call>{ADD.replace('1', '7')}", "done")
    assert ran == [(7, 2), (1, 2)]
    first, second, third = answers(played)[0].split("\n\n")
    assert (first, third) == ("3", "9") and second.startswith("error: this call was not run: ")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("smollm", '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": "2"}}'),
        ("llama3", "<|python_tag|>add.call(a=1, b=2)"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    ],
)
def test_each_family_reaches_the_tool(family, text):
    played, ran = play(text, "done", family=family)
    assert ran == [(1, 2)] and answers(played) == ["3"]


def test_malformed_calls_to_the_last_turn_end_the_rollout_by_the_rule_for_calls():
    """They are calls: where no turn follows, they would be answered to nobody."""
    played, ran = play("<tool_call>", "<tool_call>", max_turns=2)
    assert played.outcome == ("turns", 0.0) and ran == []
