"""AgentEnv: one call of a user's agent, answered as an environment's turn is."""

import asyncio
import sys
import threading

import pytest

from pipeline.endpoint.agent_env import AgentEnv, find_agent
from pipeline.errors import ConfigError
from pipeline.rollouts.agent_loop import AGENT_TURN
from tests.unit.environment_session import session

TOLD = {"row": {"n": 3}, "base_url": "http://here/v1", "api_key": "t"}
HERE = __name__
ran_on = []


async def solves(row, base_url, api_key):
    assert (base_url, api_key) == ("http://here/v1", "t")
    return row["n"] / 2


def plain(row, base_url, api_key):
    ran_on.append(threading.current_thread())
    return {"reward": 1, "metrics": {"steps": row["n"]}}


def wrapped(row, base_url, api_key):
    return solves(row, base_url, api_key)


async def unsure(row, base_url, api_key):
    return {"score": 1.0}


async def listing(row, base_url, api_key):
    return {"reward": 1.0, "metrics": ["steps"]}


async def nothing(row, base_url, api_key):
    pass


async def waits(row, base_url, api_key):
    await asyncio.sleep(3600)


not_callable = 5


def of_a_row(row):
    return 1.0


def run(agent, then=None):
    class Here(AgentEnv):
        def __init__(self):
            super().__init__(f"{HERE}:{agent}")

    async def steps(ask, host):
        assert (await ask("reset", row=TOLD, seed=1)).error is None
        turn = asyncio.ensure_future(ask("turn", **({"text": AGENT_TURN["text"]})))
        if then is not None:
            await asyncio.sleep(0.01)
            await then(ask)
        return await turn

    return session(Here, steps)


def test_what_an_agent_returns_is_the_reward():
    assert run("solves").result == {"messages": None, "reward": 1.5}
    assert run("wrapped").result["reward"] == 1.5
    assert run("plain").result == {"messages": None, "reward": 1.0, "metrics": {"steps": 3.0}}
    assert ran_on and ran_on[-1] is not threading.main_thread()


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("unsure", "the agent returned {'score': 1.0}; it returns a number, or a dict of reward and metrics"),
        ("listing", "the agent's metrics are ['steps']; they are numbers by name"),
        ("nothing", "the reward is None, which is no finite number"),
    ],
)
def test_what_is_no_reward_fails(agent, says):
    assert says in run(agent).error


def test_an_agent_can_be_dropped():
    assert "was interrupted by drop" in run("waits", lambda ask: ask("drop")).error


def test_an_agent_that_is_none_is_named():
    for path, says in (
        (f"{HERE}:nowhere", "has no 'nowhere'"),
        (f"{HERE}:not_callable", "can't be called"),
        (f"{HERE}:of_a_row", r"takes \(row\), but is called as agent\(row, base_url, api_key\) \(too many positional"),
    ):
        with pytest.raises(ConfigError, match=says):
            find_agent(path)
    assert HERE in sys.modules
