"""`guess`: find a secret number in few guesses; a tool answers each guess with higher, lower or correct.

Binary search finds all of 16 numbers in 5 guesses; guessing blindly finds about one in five. Rows carry `number` and
`seed`; every number occurs in training and among the held-out rows, which differ in their seeds: a number that was
never rewarded in training is unlearned, and holding it out would measure that.
"""

import asyncio
import random
from typing import Any

from pipeline.chat.tiny import TerseChat
from pipeline.env import Env, TrajectoryView, TurnResult, tool
from pipeline.errors import ConfigError
from pipeline.tasks.latency import parse_latency

NUM_NUMBERS = 16
NUM_GUESSES = 5

# The tiny model's format, all of it. A turn is one word: a number calls the tool and ends the turn, any other word
# is a call that can't be read; the tool's message then says so, and the guess is spent.
PROMPT = "find"
ANSWERS = ("higher", "lower", "correct")
UNREADABLE = "what"
NUMBERS = tuple(str(n) for n in range(1, NUM_NUMBERS + 1))
WORDS = (PROMPT, *ANSWERS, "error:", UNREADABLE, *NUMBERS)
MAX_TURN_TOKENS = 1
MAX_CONTEXT_TOKENS = 64
_NUMBER_OF_WORD = {word: int(word) for word in NUMBERS}

NUM_TRAIN_ROWS = 4096
NUM_HOLDOUT_ROWS = 256
FIRST_TRAIN_SEED = 1_000_000  # held-out seeds are below


class Guess(Env):
    """One game. `numbers` and `guesses` set its size, `latency` the time that the tool takes (`parse_latency`)."""

    wrap_up = PROMPT  # in the words that the tiny model knows

    def __init__(self, numbers: int = NUM_NUMBERS, guesses: int = NUM_GUESSES, latency: str = "none") -> None:
        for name, value in (("numbers", numbers), ("guesses", guesses)):
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"Guess got {name}={value!r}. It is a count, so an integer of at least 1. Correct it."
                )
        self._numbers = numbers
        self._guesses = guesses
        self._latency = parse_latency(latency)
        self._secret = 0
        self._found = False

    @tool
    async def guess(self, number: int) -> str:
        """Guess the secret number; the answer is higher (the secret is higher than the guess), lower or correct.

        Args:
            number: the guess
        """
        seconds = self._latency.sample(self.rng)
        if seconds > 0.0:
            await asyncio.sleep(seconds)
        if number == self._secret:
            self._found = True
            return "correct"
        return "higher" if self._secret > number else "lower"

    def reset(self, row: dict[str, Any]) -> str:
        self._secret = row["number"]
        if not 1 <= self._secret <= self._numbers:
            raise ValueError(f"the row's number is {self._secret}, outside 1 to {self._numbers}")
        return PROMPT

    async def on_turn(self, traj: TrajectoryView) -> TurnResult | None:
        messages = await self.call_tools(traj)
        if not messages or self._found or traj.num_turns >= self._guesses:
            return None
        return TurnResult(messages=messages)

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float:
        return 1.0 if self._found and traj.num_turns <= self._guesses else 0.0


def find_calls(words: list[str]) -> list[dict[str, Any]]:
    """The call that a turn's words are: the first number word is the guess."""
    for word in words:
        if word in _NUMBER_OF_WORD:
            return [{"name": "guess", "arguments": {"number": _NUMBER_OF_WORD[word]}, "error": None}]
    return [{"name": "guess", "arguments": {}, "error": UNREADABLE}]


def chat_format() -> TerseChat:
    return TerseChat(WORDS, stop_words=NUMBERS, find_calls=find_calls, cut_word=UNREADABLE)


def train_rows(seed: int) -> list[dict[str, int]]:
    """Rows in blocks that hold every number once, shuffled by `seed`."""
    rng = random.Random(seed)
    numbers: list[int] = []
    while len(numbers) < NUM_TRAIN_ROWS:
        block = list(range(1, NUM_NUMBERS + 1))
        rng.shuffle(block)
        numbers.extend(block)
    return [{"number": number, "seed": FIRST_TRAIN_SEED + index} for index, number in enumerate(numbers)]


def holdout_rows() -> list[dict[str, int]]:
    """The same rows for every run: each number equally often, seeds that no training row has."""
    return [{"number": 1 + index % NUM_NUMBERS, "seed": index} for index in range(NUM_HOLDOUT_ROWS)]
