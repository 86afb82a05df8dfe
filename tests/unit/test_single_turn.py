"""SingleTurn: the prompt of each row, one turn, and the user's function, plain or async, as its reward."""

import asyncio
import functools
import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from environment_session import less_line, turn

import pipeline as rl
from pipeline.environments.host import EnvironmentHost
from pipeline.single_turn import SingleTurn
from pipeline.user_code.load import load_env_makers
from pipeline.user_code.source import EnvSource
from workers.message_codec import decode, encode
from workers.messages import EnvironmentCall, EnvironmentReplies, Environments

CASES = Path(__file__).parent.parent / "data" / "cases"


def matches(text, row):
    return text == row["answer"]


async def later(text, row):
    await asyncio.sleep(0)
    return len(text) / 4


def of_type(text, row):
    """Which JSON type the answer came as; the exact value of what is no small number."""
    answer = row["answer"]
    known = {int: 1, str: 2, type(None): 3, float: 4, list: 5}
    return 6 if answer == 12345678901234567890 and type(answer) is int else known[type(answer)]


class Graders:
    @staticmethod
    def fixed(text, row):
        return 0.5

    def bound(self, text, row):
        return 1


def roll_out(source, row, **turn_argument):
    """(first messages, reply of the one turn): by messages as bytes, as to and from an environment process."""
    if source.runs_in_thread:
        make_env, name = source.load_makers()
    else:
        config = source.start_config(60.0, None)
        make_env, name = load_env_makers(config["environment"], config["arguments"])

    def carried(message):
        return decode(encode(message, 0))[1]

    async def run():
        host = EnvironmentHost(make_env, timeout=60.0, name=name)
        replies = []
        for number, (call, argument) in enumerate(
            [("reset", {"row": row, "seed": 0}), ("turn", turn(**turn_argument))]
        ):
            (record,) = carried(Environments([EnvironmentCall(number, 0, 0, call, argument)])).calls
            replies += carried(EnvironmentReplies([await host.handle(record)])).replies
            if replies[-1].error is not None:
                break
        await host.close()
        return replies

    first, *rest = asyncio.run(run())
    return first.result.get("messages"), rest[0] if rest else first


def single(reward, **arguments):
    return EnvSource(SingleTurn, {"reward": reward} | arguments)


ROW = {"prompt": "2 + 2?", "answer": "4"}


@pytest.mark.parametrize("reward", [matches, "test_single_turn:matches", f"{__file__}:matches"])
@pytest.mark.parametrize(("text", "expected"), [("4", 1.0), ("5", 0.0)])
def test_function_says_what_the_turn_is_worth(reward, text, expected):
    source = single(reward)
    assert source.runs_in_processes
    messages, reply = roll_out(source, ROW, text=text)
    assert messages == [{"role": "user", "content": "2 + 2?"}]
    assert (reply.result["messages"], reply.result["reward"], reply.error) == (None, expected, None)


def test_function_may_be_async_or_inside_a_class():
    assert roll_out(single(later), ROW, text="ab")[1].result["reward"] == 0.5
    assert roll_out(single(Graders.fixed), ROW)[1].result["reward"] == 0.5
    assert roll_out(single("test_single_turn:Graders.fixed"), ROW)[1].result["reward"] == 0.5


@pytest.mark.parametrize(
    "reward", [lambda text, row: 0.25, functools.partial(lambda text, row, worth: worth, worth=0.25)]
)
def test_function_that_no_other_process_can_import_runs_in_a_thread(reward):
    source = single(reward)
    assert source.runs_in_thread
    assert roll_out(source, ROW)[1].result["reward"] == 0.25
    assert single(Graders().bound).runs_in_thread


def test_turn_is_scored_by_another_instance_when_its_process_is_lost():
    """Nothing that was sampled is thrown away."""
    makers, name = single(matches).load_makers()

    async def run():
        host = EnvironmentHost(makers, timeout=60.0, name=name)
        begun = await host.handle(EnvironmentCall(1, 0, 0, "reset", {"row": ROW, "seed": 0}))
        story = {"row": ROW, "seed": 0, "messages": begun.result["messages"], "turns": []}
        await host.handle(EnvironmentCall(2, 0, 1, "restore", story))
        scored = await host.handle(EnvironmentCall(3, 0, 1, "turn", turn(text="4")))
        await host.close()
        return begun, scored

    begun, scored = asyncio.run(run())
    assert (begun.result["recovery"], scored.result["reward"]) == ("stateless", 1.0)


def test_turn_that_calls_a_tool_is_the_end_too():
    _, reply = roll_out(single(matches), ROW, text="4", calls=[("search", {"q": "?"})])
    assert reply.result["messages"] is None and reply.result["reward"] == 1.0


def test_system_prompt_goes_before_a_prompt_that_has_none():
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    own = [{"role": "system", "content": "mine"}, *history]
    source = single(matches, system_prompt="be brief", prompt_field="question")
    system = {"role": "system", "content": "be brief"}
    for prompt, expected in (
        ("hi", [system, history[0]]),
        (history, [system, *history]),
        (own, own),
    ):
        assert roll_out(source, {"question": prompt, "answer": ""})[0] == expected


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (Fraction(1, 4), 0.25), (-1e-3, -1e-3)],
)
def test_reward_is_a_number_of_any_kind(value, number):
    assert roll_out(single(lambda text, row: value), ROW)[1].result["reward"] == number


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 1e200, 10**400, [1, 2], 1j, {"reward": 1}])
def test_what_is_no_finite_number_fails_the_trajectory(value):
    reply = roll_out(single(lambda text, row: value), ROW)[1]
    assert reply.error.startswith("SingleTurn.reward of trajectory 0.0 failed with ValueError: the reward is")
    assert "reward" not in reply.result


def test_what_the_function_raises_fails_the_trajectory_and_its_line_is_named():
    reply = roll_out(single(matches), {"prompt": "2 + 2?"})[1]
    assert less_line(reply.error, __file__) == "SingleTurn.reward of trajectory 0.0 failed with KeyError: 'answer'"
    assert reply.error.endswith(f" line {matches.__code__.co_firstlineno + 1})")


def test_what_headway_refuses_names_no_line_of_its_own():
    reply = roll_out(single(lambda text, row: None), ROW)[1]
    assert reply.error.endswith("failed with ValueError: the reward is None, which is no finite number")


def test_a_decorator_may_give_arguments_of_its_own():
    def told(function):
        return functools.wraps(function)(lambda text, row: function(text, row, 0.5))

    assert roll_out(single(told(lambda text, row, value: value)), ROW)[1].result["reward"] == 0.5


def test_answer_comes_to_the_function_as_the_type_it_has_in_the_file():
    """Case HR06: a column of several types; its kind is a silent cast."""
    with open(CASES / "HR06" / "mixed_types.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [roll_out(single(of_type), row)[1].result["reward"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("reward", "arguments", "fault"),
    [
        ("exact", {}, "The reward is 'exact'. .* Write for example my_rewards:exact"),
        ("no/such.py:exact", {}, "The reward 'no/such.py:exact' can't be imported: the file .* is not there"),
        ("__main__:exact", {}, "no other process can import the script itself"),
        (7, {}, "The reward 7 is int; it must be a function"),
        (lambda text: 0, {}, r"takes \(text\), but is called as reward\(text, row\)"),
        (lambda text, row, tokenizer: 0, {}, "missing a required argument: 'tokenizer'"),
        (matches, {"prompt": "question"}, "SingleTurn takes .*unexpected keyword argument 'prompt'"),
        (lambda text, row: 0, {"prompt_field": 3}, "SingleTurn.prompt_field is 3"),
        (lambda text, row: 0, {"allow_empty_prompts": "no"}, "SingleTurn.allow_empty_prompts is 'no'"),
    ],
)
def test_what_can_be_no_reward_is_refused_before_anything_starts(reward, arguments, fault):
    for env in (SingleTurn, "pipeline.single_turn:SingleTurn"):
        with pytest.raises((rl.ConfigError, rl.ConfigTypeError), match=fault):
            EnvSource(env, {"reward": reward} | arguments)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("test_single_turn:matchs", "has no 'matchs'. Did you mean matches"),
        ("test_single_turn:ROW", "The reward test_single_turn:ROW is dict; it must be a function"),
        ("builtins:len", r"The reward builtins:len takes \(obj, /\)"),
    ],
)
def test_what_can_be_no_reward_is_refused_where_it_is_imported(path, fault):
    with pytest.raises((rl.ConfigError, rl.ConfigTypeError), match=fault):
        SingleTurn(path)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"promt": "x"}, "Row 1 has no 'prompt', only 'promt'.* Did you mean promt?"),
        ({}, "Row 1 has no 'prompt', only"),
        ({"prompt": 7}, "Row 1, as its 'prompt', gave int"),
        ({"prompt": " \n"}, r"Row 1 has an empty prompt \('prompt' is ' \\n'\). Write the prompt, or say"),
        ({"prompt": []}, r"Row 1 has an empty prompt \('prompt' is \[\]\)"),
        ({"prompt": [{"role": "bot", "content": "x"}]}, "Row 1, as its 'prompt', gave the message"),
    ],
)
def test_row_without_a_prompt_is_refused_before_anything_starts(row, fault):
    with pytest.raises((rl.ConfigError, rl.ConfigTypeError), match=fault):
        single(matches).check_rows([ROW, row])
    mix = EnvSource({"one": SingleTurn, "other": "pipeline.tasks.guess:Guess"}, {"one": {"reward": matches}})
    mix.check_rows([{"number": 3, "environment": "other"}, ROW | {"environment": "one"}])
    with pytest.raises((rl.ConfigError, rl.ConfigTypeError), match=fault):
        mix.check_rows([{"number": 3, "environment": "other"}, row | {"environment": "one"}])


def test_empty_prompts_pass_where_they_are_allowed():
    rows = [ROW, {"prompt": "", "answer": "4"}]
    single(matches, allow_empty_prompts=True).check_rows(rows)
    messages, _ = roll_out(single(matches, allow_empty_prompts=True), rows[1])
    assert messages == [{"role": "user", "content": ""}]


def test_engine_takes_a_reward_in_place_of_an_environment():
    model = rl.Supervisor()
    engine = rl.RolloutEngine(model, reward=matches, env_arguments={"prompt_field": "question"})
    assert engine.env.start_config(60.0, None)["arguments"] == {
        "reward": "test_single_turn:matches",
        "prompt_field": "question",
    }
    for options in ({}, {"env": rl.SingleTurn, "reward": matches}):
        with pytest.raises(rl.ConfigTypeError, match="give the one or the other"):
            rl.RolloutEngine(model, **options)
    with pytest.raises(rl.ConfigError, match="env_arguments names it again"):
        rl.RolloutEngine(model, reward=matches, env_arguments={"reward": matches})


def test_module_of_a_function_is_found_under_its_name():
    assert sys.modules["test_single_turn"].matches is matches  # what the paths above rest on
