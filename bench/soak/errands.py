"""What the soak rolls out: an environment whose tools are slow, raise or hang, and that keeps a ledger of its own.

It is a user's module: a run is given its path (`--env bench/soak/errands.py:Errands`). The random model writes no
call that can be read, so the environment makes each turn's call itself; it then goes the way of every tool call.
"""

import asyncio
import json
import os
import random
import time
from dataclasses import replace
from typing import Any

import pipeline as rl

NUM_TURNS = 3
MEDIAN_SECONDS, SIGMA, MOST_SECONDS = 0.15, 1.0, 3.0  # of a slow tool, log-normal; below the soak's environment timeout
CHANCE = random.SystemRandom()  # no seed: what is started again must not come to the same end


class Errands(rl.Env):
    """Three turns with a tool call each; the reward is drawn, and written to the ledger before it is returned."""

    def __init__(self, ledger: str, hang: float, recovery: str) -> None:
        """ledger: a file that every call of `reward` adds a line of JSON to. hang: probability that a call never
        ends. recovery: as `Env.recovery`.
        """
        self.recovery = recovery
        self._ledger = ledger
        self._hang = hang

    def reset(self, row: dict[str, Any]) -> str:
        return row["prompt"]

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """The row and the turns are all there is to an episode."""

    @rl.tool
    async def walk(self, seconds: float) -> str:
        """Wait without holding a thread.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return "done"

    @rl.tool
    def carry(self, seconds: float) -> str:
        """Wait in a thread, as a blocking client does.

        Args:
            seconds: how long
        """
        time.sleep(seconds)
        return "done"

    @rl.tool
    def stumble(self) -> str:
        """Raise what the model is told."""
        raise ValueError("no such errand")

    @rl.tool
    def lose(self) -> str:
        """Raise what fails the trajectory, which starts again."""
        raise rl.InfrastructureError("the errand's road is closed")

    async def on_turn(self, traj: rl.TrajectoryView) -> rl.TurnResult | None:
        if traj.num_turns >= NUM_TURNS:
            return None
        chance = CHANCE.random()
        if chance < self._hang / 3:
            time.sleep(1e6)  # the environment process's only loop
        seconds = 1e6 if chance < self._hang else min(CHANCE.lognormvariate(0.0, SIGMA) * MEDIAN_SECONDS, MOST_SECONDS)
        name = CHANCE.choices(("walk", "carry", "stumble", "lose"), (48, 48, 3, 1))[0]
        arguments = {"seconds": seconds} if name in ("walk", "carry") else {}
        call = rl.ToolCall(name, arguments, id=f"call-{traj.num_turns}")
        traj.turns[-1] = replace(traj.turns[-1], tool_calls=(call,))
        return rl.TurnResult(messages=await self.call_tools(traj))

    def reward(self, traj: rl.TrajectoryView, row: dict[str, Any]) -> float:
        reward = CHANCE.randrange(1000) / 1000
        line = {"row": row["id"], "member": traj.member, "tokens": traj.num_generated_tokens, "reward": reward}
        ledger = os.open(self._ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(ledger, json.dumps(line).encode() + b"\n")  # one write: a kill leaves all of it or nothing
        finally:
            os.close(ledger)
        return reward


def write_rows(path: str, count: int) -> None:
    """A file of `count` rows, each told from all others by its id."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps({"id": f"errand-{number}", "prompt": f"Run errand {number}."}) + "\n")
