"""`arithmetic`: a small number and three steps up or down from it; the answer is graded exactly. One turn, no tool.

Rows carry `expression` and `answer`. Values stay from 0 to 7 on the way, which leaves some 300 expressions: as many as
the tiny model can learn from in a minute or two. Held-out ones are in no training set, so they can't be remembered.
"""

import random
from functools import cache
from itertools import product
from typing import Any

from pipeline.chat.tiny import TerseChat
from pipeline.chat.tool_formats import without_reasoning
from pipeline.env import Env, TrajectoryView, TurnResult
from pipeline.errors import ConfigError
from pipeline.tasks.expressions import evaluate, final_number
from pipeline.wording import shown

LARGEST = 7  # all values on the way are from 0 to this
NUM_STEPS = 3
STEPS = ("+ 1", "+ 2", "- 1", "- 2")

NUM_TRAIN_ROWS = 4096
NUM_HOLDOUT_ROWS = 64
HOLDOUT_SEED = 0x5EED

# In plain text.
SYSTEM = 'Calculate, then answer: "The answer is N."'
TEXT_BUDGET = {"max_turns": 2, "max_turn_tokens": 96, "max_context_tokens": 512}

# In the words of the tiny model `4 + 1 - 2 + 2` is `4 +1 -2 +2 =`; a turn is one word, and an answer if it is a number.
EQUALS = "="
NUMBERS = tuple(str(number) for number in range(LARGEST + 1))
WORDS = (EQUALS, *(step.replace(" ", "") for step in STEPS), *NUMBERS)
TINY_BUDGET = {"max_turns": 2, "max_turn_tokens": 1, "max_context_tokens": 16}


def chat_format() -> TerseChat:
    return TerseChat(WORDS, stop_words=WORDS)


class Arithmetic(Env):
    """One expression. `language` is "text" or "tiny". Reward: 1 for the right number, else 0."""

    def __init__(self, language: str = "text") -> None:
        if language not in ("text", "tiny"):
            raise ConfigError(f'Arithmetic got language={shown(language)}. It must be "text" or "tiny". Choose one.')
        self._is_tiny = language == "tiny"
        self.wrap_up = EQUALS if self._is_tiny else SYSTEM

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]] | str:
        expression = row["expression"]
        if self._is_tiny:
            return f"{expression.replace('+ ', '+').replace('- ', '-')} {EQUALS}"
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {expression}?"}]

    def on_turn(self, traj: TrajectoryView) -> TurnResult | None:
        return None

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float:
        if self._is_tiny:
            return float(traj.text == str(row["answer"]))  # the word `+1` is no number
        return float(final_number(without_reasoning(traj.text)) == row["answer"])


@cache
def _problems() -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    """(those to train on, those held out): all there are, shuffled once and for all."""
    problems = []
    for parts in product(NUMBERS, *[STEPS] * NUM_STEPS):
        *earlier, answer = (int(evaluate(" ".join(parts[:end]))) for end in range(1, len(parts) + 1))
        if min(*earlier, answer) >= 0 and max(*earlier, answer) <= LARGEST:
            problems.append({"expression": " ".join(parts), "answer": answer})
    random.Random(HOLDOUT_SEED).shuffle(problems)
    return tuple(problems[NUM_HOLDOUT_ROWS:]), tuple(problems[:NUM_HOLDOUT_ROWS])


def train_rows(seed: int) -> list[dict[str, Any]]:
    """Rows in blocks that hold every training problem once, shuffled by `seed`."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < NUM_TRAIN_ROWS:
        block = [dict(problem) for problem in _problems()[0]]
        rng.shuffle(block)
        rows += block
    return rows


def holdout_rows() -> list[dict[str, Any]]:
    """The same rows for every run."""
    return [dict(problem) for problem in _problems()[1]]
