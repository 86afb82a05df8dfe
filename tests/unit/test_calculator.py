"""The calculator task: its problems, its rows, its tool and its rewards, played through the environment host."""

import asyncio

import pytest

from pipeline.commands.make_run_config import parse
from pipeline.commands.run_config import task_defaults
from pipeline.env import as_messages
from pipeline.environments.host import EnvironmentHost
from pipeline.errors import ConfigError
from pipeline.tasks import TASKS, calculator
from pipeline.tasks.calculator import CALL_CREDIT, EXAMPLES, PROBLEMS, Calculator
from pipeline.tasks.expressions import evaluate
from pipeline.user_code.load import load_env_class
from workers.messages import EnvironmentCall

ROW = {"question": "A box holds 24 pencils. How many pencils are in 10 boxes?", "answer": 240}


def call(expression="24 * 10", error=None):
    return {"name": "calculator", "arguments": {} if error else {"expression": expression}, "error": error}


def play(*turns, row=ROW, **arguments):
    """Play `turns`, texts or lists of calls; returns the reply to each call of the environment."""

    async def game():
        host = EnvironmentHost(lambda: Calculator(**arguments), timeout=60.0, name="Calculator")
        replies = [await host.handle(EnvironmentCall(0, 3, 1, "reset", {"row": row, "seed": 5}))]
        for turn in turns:
            text, calls = (turn, []) if isinstance(turn, str) else ("", turn)
            argument = {"text": text, "tool_calls": calls, "num_tokens": 9, "stopped": True}
            replies.append(await host.handle(EnvironmentCall(1, 3, 1, "turn", argument)))
        assert all(reply.error is None for reply in replies), replies
        return replies

    return asyncio.run(game())


def test_the_model_reads_examples_the_problem_and_the_tools_schema():
    (reply,) = play()
    messages = as_messages(reply.result["messages"], "reset")
    assert messages[0]["role"] == "system" and messages[-1] == {"role": "user", "content": ROW["question"]}
    (schema,) = reply.result["tools"]
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]


def test_the_examples_calculate_right():
    for called, told, said in zip(EXAMPLES[1::4], EXAMPLES[2::4], EXAMPLES[3::4], strict=True):
        function = called["tool_calls"][0]["function"]
        assert evaluate(function["arguments"]["expression"]) == int(told["content"])
        assert said["content"] == f"The answer is {told['content']}."
        assert called["tool_calls"][0]["id"] == told["tool_call_id"]


def test_a_call_is_answered_and_a_right_answer_is_worth_one():
    _, called, answered = play([call()], "The answer is 240.")
    assert [message["content"] for message in called.result["messages"]] == ["240"]
    assert answered.result == {"messages": None, "reward": 1.0}
    assert play("The answer is 240.")[-1].result["reward"] == 1.0  # however it was found


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([[call()], "The answer is 241."], CALL_CREDIT),
        ([[call()], "I don't know."], CALL_CREDIT),
        ([[call("1 / 0")], "The answer is 24."], 0.0),
        ([[call(error="it has no name")], "The answer is 24."], 0.0),
        ([[call("1 / 0"), call("24 + 10")], "34"], CALL_CREDIT),
        (["The answer is 24."], 0.0),
    ],
)
def test_a_call_that_ran_is_worth_a_little_without_the_answer(turns, reward):
    assert play(*turns)[-1].result["reward"] == reward
    assert play(*turns, call_credit=0)[-1].result["reward"] == 0.0


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("<think>\nThe answer is 241? No.\n</think>\n\nIt is 240.", 1.0),
        ("<think>\nThe answer is 240? No.\n</think>\n\nIt is 241.", 0.0),
        ("The answer is 240? No.\n</think>\n\nIt is 241.", 0.0),  # the template has opened it
        ("<think>\nThe answer is 240.\n</think>", 0.0),
        ("<think>\nThe answer is 240.", 0.0),
        ("[THINK]The answer is 241.[/THINK]240", 1.0),
    ],
)
def test_what_the_model_thinks_is_no_answer(said, reward):
    assert play(said)[-1].result["reward"] == reward


def test_what_cannot_be_evaluated_is_told_to_the_model_in_one_sentence():
    _, called = play([call("24 pencils * 10")])
    (message,) = called.result["messages"]
    assert message["content"].startswith("error: 'p' is not arithmetic; ")


def test_every_problem_is_whole_and_positive_at_the_ends_of_its_ranges():
    for problem in PROBLEMS:
        for ends in (0, 1):
            numbers = {name: span[ends] for name, span in problem.ranges.items()}
            for name, expression in problem.derived.items():
                numbers[name] = evaluate(expression.format(**numbers))
            answer = evaluate(problem.expression.format(**numbers))
            assert all(value > 0 and value == int(value) for value in (*numbers.values(), answer)), problem


def test_no_problem_has_a_number_below_one():
    rows = calculator.train_rows(3)
    assert all(type(row["answer"]) is int and row["answer"] > 0 and "-" not in row["question"] for row in rows)


def test_rows_follow_the_seed_and_all_differ():
    rows = calculator.train_rows(4)
    assert len(rows) == 4096 and rows == calculator.train_rows(4) and rows != calculator.train_rows(5)
    assert len({row["question"] for row in rows}) == len(rows)


def without_words(row):
    """The problem and its numbers: names and things may be any."""
    words = [word.strip(".?") for word in row["question"].split()]
    return " ".join(word for word in words if word not in (*calculator.NAMES, *calculator.THINGS))


@pytest.mark.parametrize("seed", [0, 1, calculator.HOLDOUT_SEED])
def test_held_out_problems_are_in_no_training_set(seed):
    held_out = {without_words(row) for row in calculator.holdout_rows()}
    assert len(held_out) == len(calculator.holdout_rows()) == 256
    assert not held_out & {without_words(row) for row in calculator.train_rows(seed)}


def test_held_out_rows_stay_the_same():
    """Evaluations of different versions are compared with each other."""
    rows = calculator.holdout_rows()
    assert rows == calculator.holdout_rows()
    assert rows[0] == {"question": "A box holds 90 tickets. How many tickets are in 29 boxes?", "answer": 2610}
    assert rows[-1]["answer"] == 410 and sum(row["answer"] for row in rows) == 145788


def test_the_registry_leads_to_the_environment_class():
    task = TASKS["calculator"]
    assert load_env_class(task.environment) is Calculator
    Calculator(**task.arguments)
    assert set(task.options) == {"latency"} and task.speaks == ("text",)
    defaults = task_defaults("calculator")
    assert defaults["max_turn_tokens"] == 96 and defaults["max_context_tokens"] == 1536


def test_it_needs_a_model_with_a_chat_template():
    with pytest.raises(ConfigError, match="calculator"):
        parse(["--task", "calculator", "--device", "cpu"])


@pytest.mark.parametrize("arguments", [{"call_credit": 1.0}, {"call_credit": "a"}, {"latency": "fixed"}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ConfigError):
        Calculator(**arguments)
