"""`calculator`: arithmetic word problems for models with a chat template; a tool evaluates expressions.

A conversation is a system message, worked examples, and the problem; the model calls the tool, reads the result and
gives its answer. Rows carry `question` and `answer` (a whole number). Held-out problems have numbers that no training
row has, whatever the seed.
"""

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.chat.tool_formats import without_reasoning
from pipeline.env import Env, TrajectoryView, tool
from pipeline.errors import ConfigError
from pipeline.tasks.expressions import evaluate, final_number, number_text
from pipeline.tasks.latency import parse_latency

MAX_TURNS = 4  # a call, a second one or its correction, the answer, one to spare
MAX_TURN_TOKENS = 96  # a call takes about 30, the answer about 10
MAX_CONTEXT_TOKENS = 1536  # the tool's description and the examples take some 600, with coarse tokenizers 1000
TOOL_OUTPUT_TOKENS = 96  # a result of 77 digits at most, or a sentence

NUM_TRAIN_ROWS = 4096
NUM_HOLDOUT_ROWS = 256
HOLDOUT_SEED = 0x5EED

# What one call that ran is worth in an episode without the right answer. A small model seldom gets all of call, result
# and answer right at first: without this, most of its groups have equal rewards, from which nothing is learned. It is
# a tenth of the answer, so no model gains by calling instead of answering.
CALL_CREDIT = 0.1

SYSTEM = (
    "You solve arithmetic problems with a calculator. Call it with one expression, read its result, then answer: "
    "The answer is N."
)
# Four: after one, SmolLM2-135M writes a right call with a probability of 0.003, after two 0.007, three 0.02, four 0.08
# (mean over problems, temperature 1).
WORKED = (
    ("A box holds 24 pencils. How many pencils are in 17 boxes?", "24 * 17"),
    ("Mia had 95 shells and gave 38 of them away. How many shells are left?", "95 - 38"),
    (
        "Tom buys 6 books at 14 dollars each and pays 5 dollars for delivery. How many dollars is that?",
        "6 * 14 + 5",
    ),
    ("Paul shares 252 cards equally among 12 friends. How many cards does each friend get?", "252 / 12"),
)


def _worked_examples() -> list[dict[str, Any]]:
    """As messages, so that each model's chat template writes the calls in the model's own form."""
    messages: list[dict[str, Any]] = []
    for index, (question, expression) in enumerate(WORKED):
        result, name = number_text(evaluate(expression)), f"example{index:02}"  # nine letters and digits: Mistral's ids
        call = {"name": "calculator", "arguments": {"expression": expression}}
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": result, "tool_call_id": name},
            {"role": "assistant", "content": f"The answer is {result}."},
        ]
    return messages


EXAMPLES = _worked_examples()


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of problem: `text` and `expression` with the same numbers in braces.

    ranges: of each number, both ends included. derived: numbers computed from others, so that divisions come out even.
    """

    text: str
    expression: str
    ranges: dict[str, tuple[int, int]]
    derived: dict[str, str]


def _problem(text: str, expression: str, derived: dict[str, str] | None = None, **ranges: tuple[int, int]) -> Problem:
    return Problem(text, expression, ranges, derived or {})


PROBLEMS: tuple[Problem, ...] = (
    _problem(
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "{a} + {b}",
        a=(11, 999),
        b=(11, 999),
    ),
    _problem(
        "{name} had {a} {things} and gave {b} of them away. How many {things} are left?",
        "{a} - {b}",
        {"a": "{b} + {c}"},
        b=(11, 499),
        c=(11, 499),
    ),
    _problem(
        "A box holds {a} {things}. How many {things} are in {b} boxes?",
        "{a} * {b}",
        a=(12, 99),
        b=(3, 49),
    ),
    _problem(
        "{name} shares {c} {things} equally among {b} friends. How many {things} does each friend get?",
        "{c} / {b}",
        {"c": "{a} * {b}"},
        a=(12, 99),
        b=(3, 19),
    ),
    _problem(
        "{name} buys {a} {things} at {b} dollars each and pays {c} dollars for delivery. How many dollars is that?",
        "{a} * {b} + {c}",
        a=(3, 49),
        b=(3, 49),
        c=(2, 30),
    ),
    _problem(
        "{name} works {a} hours a day for {b} days and has {c} hours left. How many hours is the whole work?",
        "{a} * {b} + {c}",
        a=(2, 9),
        b=(11, 60),
        c=(11, 99),
    ),
    _problem(
        "A shop has {a} boxes of {b} {things} and sells {c} {things}. How many {things} are left?",
        "{a} * {b} - {c}",
        a=(5, 40),
        b=(12, 60),
        c=(11, 59),
    ),
    _problem(
        "There are {a} red and {b} blue {things}. {name} puts them into bags of {d}. How many bags are filled?",
        "({a} + {b}) / {d}",
        {"b": "{d} * {e} - {a}"},
        a=(11, 40),
        d=(3, 12),
        e=(15, 40),
    ),
)
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Lena", "Omar")
THINGS = ("apples", "books", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")


class Calculator(Env):
    """One problem. `latency` is the time that the tool takes (`parse_latency`).

    Reward: 1 for the right answer, however it was found; else `call_credit` if a call ran, else 0.
    """

    wrap_up = 'Answer now, without calling the calculator: "The answer is N."'

    def __init__(self, latency: str = "none", call_credit: float = CALL_CREDIT) -> None:
        if not isinstance(call_credit, int | float) or not 0.0 <= call_credit < 1.0:
            raise ConfigError(
                f"Calculator got call_credit={call_credit!r}. It is what a call is worth beside an answer's 1, so a "
                "number from 0 to below 1. Correct it."
            )
        self._latency = parse_latency(latency)
        self._call_credit = float(call_credit)
        self._called = False

    @tool
    async def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: numbers, + - * / ** and parentheses, for example 12 * (3 + 4)
        """
        seconds = self._latency.sample(self.rng)
        if seconds > 0.0:
            await asyncio.sleep(seconds)
        result = number_text(evaluate(expression))
        self._called = True
        return result

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": SYSTEM}, *EXAMPLES, {"role": "user", "content": row["question"]}]

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float:
        if final_number(without_reasoning(traj.text)) == row["answer"]:
            return 1.0
        return self._call_credit if self._called else 0.0


def make_row(rng: random.Random) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A row, and which problem with which numbers it is."""
    kind = rng.randrange(len(PROBLEMS))
    problem = PROBLEMS[kind]
    numbers = {name: rng.randint(*ends) for name, ends in problem.ranges.items()}
    for name, expression in problem.derived.items():
        numbers[name] = int(evaluate(expression.format(**numbers)))
    words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    answer = int(evaluate(problem.expression.format(**numbers)))
    question = problem.text.format(**numbers, **words)
    return {"question": question, "answer": answer}, (kind, *(numbers[name] for name in sorted(numbers)))


def _rows(
    seed: int, count: int, taken: frozenset[tuple[int, ...]]
) -> tuple[list[dict[str, Any]], set[tuple[int, ...]]]:
    """`count` rows with different numbers, none of them `taken`, and which they are."""
    rng = random.Random(seed)
    rows, found = [], set()
    while len(rows) < count:
        row, key = make_row(rng)
        if key not in found and key not in taken:
            found.add(key)
            rows.append(row)
    return rows, found


@cache
def _holdout() -> tuple[list[dict[str, Any]], frozenset[tuple[int, ...]]]:
    rows, found = _rows(HOLDOUT_SEED, NUM_HOLDOUT_ROWS, frozenset())
    return rows, frozenset(found)


def train_rows(seed: int) -> list[dict[str, Any]]:
    return _rows(seed, NUM_TRAIN_ROWS, _holdout()[1])[0]


def holdout_rows() -> list[dict[str, Any]]:
    """The same rows for every run."""
    return [dict(row) for row in _holdout()[0]]
