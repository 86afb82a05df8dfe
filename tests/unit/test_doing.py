"""What a trajectory is at, in words for those who wait for it."""

import asyncio
import re

import pytest
from played_rollouts import Played
from test_rollouts import WAIT, group, member

from pipeline.rollouts.doing import Doing, acting, in_line


def test_it_is_told_with_since_when_and_what_ends_it():
    doing = Doing("tool", "tool search", since=100.0)
    assert doing.told("ended by environment_timeout = 60 s", now=112.4) == (
        "tool search for 12 s, ended by environment_timeout = 60 s"
    )


def test_several_tools_are_named_once_each_and_none_is_the_last_turn():
    calls = [{"name": name} for name in ("search", "read", "search")]
    assert (acting(calls).cause, acting(calls).words) == ("tool", "tool search, read")
    assert (acting([]).cause, acting([]).words) == ("reward", "on_turn or reward")
    assert in_line().cause == "queue"


class Asked(Played):
    """One of two groups has a place: 20 ticks of sampling, then 50 of its environment."""

    def __init__(self, asked, at, **options):
        self.asked, self.at, self.held = asked, at, None
        super().__init__([group(member(2, tool_ticks=50))] * 2, completion=WAIT, budget={}, concurrency=1, **options)

    async def _play(self, *arguments):
        asyncio.get_running_loop().call_later(self.at, self._ask)
        await super()._play(*arguments)

    def _ask(self):
        self.held = self.rollouts.doing(self.asked)


@pytest.mark.parametrize(
    ("asked", "at", "cause", "words"),
    [
        (0, 10, "sampling", r"sampling of turn 1, at most 4096 tokens, for \d+ s, ended by sampler 0, which has it"),
        (0, 30, "reward", r"on_turn or reward for \d+ s, ended by environment_timeout = 600 s at the latest"),
        (1, 30, "queue", r"in line behind 1 others \(concurrency = 1\)"),
    ],
)
def test_who_holds_others_up_is_told_with_what_would_end_it(asked, at, cause, words):
    held = Asked(asked, at).held
    assert (held.trajectory, held.cause) == (None if cause == "queue" else "0.0", cause)
    assert re.fullmatch(words, held.words)


def test_its_own_time_is_told_where_that_may_be_over_first():
    words = Asked(0, 30, trajectory_timeout=100.0).held.words
    assert words.endswith(" s, ended by trajectory_timeout = 100 s, or environment_timeout = 600 s at the latest")
