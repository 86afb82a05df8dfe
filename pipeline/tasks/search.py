"""`search`: questions about people whose answer is two or three look-ups away; a tool searches a small directory.

Each row has a directory of its own (`search_world.py`). Models with a chat template read sentences and answer in one;
the tiny model knows a few people by name and one relation, writes a name a turn, and its last turn is the answer.
"""

import asyncio
import re
from typing import Any

from pipeline.chat.tiny import TerseChat
from pipeline.chat.tool_formats import without_reasoning
from pipeline.env import Env, TrajectoryView, TurnResult, tool
from pipeline.errors import ConfigError
from pipeline.tasks.latency import parse_latency
from pipeline.tasks.search_world import EXAMPLE_WORLDS, HOPS, NAMES, RELATIONS, World, make_world
from pipeline.user_code.tool_schema import ArgumentError
from pipeline.wording import shown

# What following the whole chain of look-ups is worth without the right answer; a part of it is worth its share. It is
# what the tiny model starts from, whose chance of three right names in a row is one in some thousands at first.
CHAIN_CREDIT = 0.3

# --- in plain text ---------------------------------------------------------------------------------------------------

TEXT_BUDGET = {
    "max_turns": 6,  # three look-ups, two of them again, the answer
    "max_turn_tokens": 96,  # a call takes about 30, the answer about 10
    "max_context_tokens": 2560,  # the tool and the examples take some 630, with coarse tokenizers 1,500
    "tool_output_tokens": 160,  # four facts about each of a few people
}
SYSTEM = (
    "You answer questions about people by searching a directory. Each search tells whom one person knows. Search one "
    "person after the other, then answer: The answer is NAME."
)
MAX_PEOPLE = 3  # that one search tells of

_WORD = re.compile(r"\w+")
_ANSWER = re.compile(r"\banswer\b\s*(?:is|=|:)", re.IGNORECASE)
_NAME_OF = {name.lower(): name for name in NAMES}


def names_in(text: str) -> list[str]:
    """The people that a text names, in order."""
    return [_NAME_OF[word] for word in map(str.lower, _WORD.findall(text)) if word in _NAME_OF]


def final_name(text: str) -> str | None:
    """Whom a text gives as its answer: the first one behind the last "answer is" (or "answer:"), else the last one."""
    if answers := list(_ANSWER.finditer(text)):
        return next(iter(names_in(text[answers[-1].end() :])), None)
    return next(reversed(names_in(text)), None)


def question_of(world: World) -> str:
    """`Who is the boss of the friend of Ann's teacher?`"""
    first, *rest = world.asked
    others = "".join(f"the {relation} of " for relation in reversed(rest))
    return f"Who is {others}{world.chain[0]}'s {first}?"


def _sentences(world: World, people: list[str]) -> str:
    told = [f"{one}'s {relation} is {world.facts[one, relation]}." for one in people for relation in RELATIONS]
    return " ".join(told)


def _worked_examples() -> list[dict[str, Any]]:
    """As messages, so that each model's chat template writes the calls in the model's own form."""
    messages: list[dict[str, Any]] = []
    for seed, hops in zip(EXAMPLE_WORLDS, HOPS, strict=True):
        world = make_world(seed, hops, NAMES, RELATIONS)
        messages.append({"role": "user", "content": question_of(world)})
        for index, person in enumerate(world.chain[:-1]):
            name = f"search{hops}{index:02}"  # nine letters and digits: Mistral's ids
            call = {"name": "search", "arguments": {"query": person}}
            calls = [{"id": name, "type": "function", "function": call}]
            found = _sentences(world, [person])
            messages += [
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "name": "search", "content": found, "tool_call_id": name},
            ]
        messages.append({"role": "assistant", "content": f"The answer is {world.chain[-1]}."})
    return messages


EXAMPLES = _worked_examples()

# --- in the words of the tiny model ----------------------------------------------------------------------------------

# A question is `boss` once per look-up, and a name. A turn is one word: a name is looked up, any other word is a call
# that can't be read; the tool's message then says so, and the look-up is spent. The turn behind the last look-up is the
# answer. docs/decisions/tasks.md has what was too hard: a word of its own for the answer, and two relations.
RELATION = "boss"
UNREADABLE = "what"
TINY_NAMES = tuple(name.lower() for name in NAMES[:10])
WORDS = (RELATION, "error:", UNREADABLE, *TINY_NAMES)
TINY_BUDGET = {"max_turn_tokens": 1, "max_context_tokens": 64}


def find_calls(words: list[str]) -> list[dict[str, Any]]:
    """The call that a turn's word is."""
    for word in words:
        if word in TINY_NAMES:
            return [{"name": "search", "arguments": {"query": word}, "error": None}]
    return [{"name": "search", "arguments": {}, "error": UNREADABLE}]


def chat_format() -> TerseChat:
    return TerseChat(WORDS, stop_words=WORDS, find_calls=find_calls, cut_word=UNREADABLE)


# ---------------------------------------------------------------------------------------------------------------------


class Search(Env):
    """One question. `latency` is the time that a search takes (`parse_latency`), `language` "text" or "tiny".

    Reward: 1 for the right answer, however it was found; else `chain_credit` times the share of the chain that was
    looked up in order.
    """

    def __init__(self, language: str = "text", latency: str = "none", chain_credit: float = CHAIN_CREDIT) -> None:
        if language not in ("text", "tiny"):
            raise ConfigError(f'Search got language={shown(language)}. It must be "text" or "tiny". Choose one.')
        if type(chain_credit) not in (int, float) or not 0.0 <= chain_credit < 1.0:
            raise ConfigError(
                f"Search got chain_credit={shown(chain_credit)}. It is what the look-ups are worth beside an answer's "
                "1, so a number from 0 to below 1. Correct it."
            )
        self._is_tiny = language == "tiny"
        self._latency = parse_latency(latency)
        self._chain_credit = float(chain_credit)
        self._followed = 0  # look-ups along the chain
        self.wrap_up = UNREADABLE if self._is_tiny else 'Answer now, without searching: "The answer is NAME."'

    @tool
    async def search(self, query: str) -> str:
        """Search the directory for a person.

        Args:
            query: the person's name
        """
        seconds = self._latency.sample(self.rng)
        if seconds > 0.0:
            await asyncio.sleep(seconds)
        people = [query] if query in TINY_NAMES else []
        if not self._is_tiny:
            people = list(dict.fromkeys(names_in(query)))[:MAX_PEOPLE]
        if not people:
            known = "the directory has nothing about that; search for the name of a person"
            raise ArgumentError(UNREADABLE if self._is_tiny else known)
        chain = self._world.chain
        if self._followed < len(self._world.asked) and chain[self._followed] in people:
            self._followed += 1
        return self._world.facts[people[0], RELATION] if self._is_tiny else _sentences(self._world, people)

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]] | str:
        names, relations = (TINY_NAMES, (RELATION,)) if self._is_tiny else (NAMES, RELATIONS)
        if row["hops"] not in range(1, len(TINY_NAMES)):
            raise ValueError(f"the row's hops are {row['hops']}; they count look-ups, from 1 to {len(TINY_NAMES) - 1}")
        self._world = make_world(row["world"], row["hops"], names, relations)
        if self._is_tiny:
            return " ".join([*self._world.asked, self._world.chain[0]])
        question = {"role": "user", "content": question_of(self._world)}
        return [{"role": "system", "content": SYSTEM}, *EXAMPLES, question]

    async def on_turn(self, traj: TrajectoryView) -> TurnResult | None:
        if self._is_tiny and traj.num_turns > len(self._world.asked):
            return None  # the answer
        return await super().on_turn(traj)

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float:
        said = traj.text if self._is_tiny else final_name(without_reasoning(traj.text))
        if said == self._world.chain[-1]:
            return 1.0
        return self._chain_credit * self._followed / len(self._world.asked)
