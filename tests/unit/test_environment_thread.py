"""Environments in a thread of the supervisor: they get and give copies, as those in a process of their own do."""

import asyncio

import pytest

import pipeline as rl
from pipeline.environments.activity import private_board
from pipeline.environments.thread import EnvironmentThread
from pipeline.processes.environment.environment_client import EnvironmentClient


class Changing(rl.Env):
    """Changes whatever it is given, and what it gave."""

    def reset(self, row):
        row["seen"].append(1)
        self.message = {"role": "user", "content": "first"}
        return [self.message]

    def on_turn(self, traj):
        self.message["content"] = "changed"
        traj.messages[0]["content"] = "changed, too"

    def reward(self, traj, row):
        return len(row["seen"])


def test_what_users_code_changes_is_its_own(tmp_path):
    """A row is that of all members of its group and of every later round; a conversation is the trajectory's record."""
    row = {"seen": []}

    async def play(client, member):
        handle = client.open(0, member)
        begun = (await handle.call("reset", {"row": row, "seed": 0})).result["messages"]
        turn = {"text": "hm", "tool_calls": [], "num_tokens": 1, "stopped": True}
        return begun, (await handle.call("turn", turn)).result["reward"]

    async def play_both():
        thread = EnvironmentThread(Changing, "Changing", 10.0, None, str(tmp_path / "log"), private_board())
        client = EnvironmentClient([thread.send], pytest.fail)
        thread.start(client.receive)
        try:
            return [await play(client, member) for member in range(2)]
        finally:
            thread.close()

    assert asyncio.run(play_both()) == [([{"role": "user", "content": "first"}], 1)] * 2
    assert row == {"seen": []}
