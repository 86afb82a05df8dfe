"""The small worlds of the task `search`: people, who is what to whom, and a question over two or three such facts.

A world is made from a seed alone, and each row has a world of its own: nothing can be learned by heart.
"""

import random
from dataclasses import dataclass
from typing import Any

NAMES = (
    *("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hanna", "Ivo", "Jill", "Karl", "Lea"),
    *("Milo", "Nora", "Otto", "Pia", "Quinn", "Rosa", "Sven", "Tara", "Udo", "Vera", "Will", "Zoe"),
)
RELATIONS = ("boss", "friend", "neighbour", "teacher")
HOPS = (2, 3)

NUM_TRAIN_ROWS = 4096
NUM_HOLDOUT_ROWS = 256
FIRST_TRAIN_WORLD = 1_000_000  # held-out worlds are below, and those of examples
EXAMPLE_WORLDS = (999_998, 999_999)


@dataclass(frozen=True, slots=True)
class World:
    """facts: (person, relation) -> person. asked: the relations of the question, that of `chain[0]` first. chain: whom
    one meets on the way, from the one that the question names to the answer; all different.
    """

    facts: dict[tuple[str, str], str]
    asked: tuple[str, ...]
    chain: tuple[str, ...]


def make_world(seed: int, hops: int, names: tuple[str, ...], relations: tuple[str, ...]) -> World:
    """The world of that seed. Each relation leads round all people, so everybody has one and is one to somebody."""
    rng = random.Random(seed)
    facts = {}
    for relation in relations:
        ring = rng.sample(names, len(names))
        facts |= {(person, relation): ring[index - 1] for index, person in enumerate(ring)}
    while True:
        asked = tuple(rng.choice(relations) for _ in range(hops))
        chain = [rng.choice(names)]
        for relation in asked:
            chain.append(facts[chain[-1], relation])
        if len(set(chain)) == len(chain):
            return World(facts, asked, tuple(chain))


def train_rows(seed: int) -> list[dict[str, Any]]:
    """Rows of both lengths equally often, whose worlds follow `seed`; none is a held-out one's."""
    rng = random.Random(seed)
    worlds = rng.sample(range(FIRST_TRAIN_WORLD, 2**53), NUM_TRAIN_ROWS)
    return [{"world": world, "hops": HOPS[index % len(HOPS)]} for index, world in enumerate(worlds)]


def holdout_rows() -> list[dict[str, Any]]:
    """The same rows for every run."""
    return [{"world": world, "hops": HOPS[world % len(HOPS)]} for world in range(NUM_HOLDOUT_ROWS)]
