"""Environments that the process tests import in real environment processes."""

import asyncio
import contextlib
import os
import time

from pipeline.env import Env, TurnResult, tool
from pipeline.errors import InfrastructureError
from pipeline.tasks.guess import Guess


class HeldGuess(Guess):
    """`guess` whose rows may name files, in `directory`, that their guesses wait for (`waits_for`), one that the first
    guess of the group waits for, so that a single member is held (`held_once`), and one that each member makes at its
    end (`marks`, with `.<member>` behind it). The reward is 0 or 1 by member, so that every batch has a gradient;
    with `fails` it raises.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def reset(self, row):
        self._waits_for = [os.path.join(self._directory, name) for name in row.get("waits_for", [])]
        self._held_once = row.get("held_once")
        return super().reset(row)

    @tool
    async def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        if self._held_once is not None:
            held, self._held_once = os.path.join(self._directory, self._held_once), None
            with contextlib.suppress(FileExistsError):  # another member is the one that is held
                open(held + ".taken", "x").close()
                self._waits_for.append(held)
        while not all(os.path.exists(path) for path in self._waits_for):
            await asyncio.sleep(0.01)
        return await super().guess(number)

    def reward(self, traj, row):
        if row.get("fails"):
            raise KeyError("answer")
        if "marks" in row:
            open(os.path.join(self._directory, f"{row['marks']}.{traj.member}"), "x").close()
        return float(traj.member % 2)


class Remembering(Guess):
    """`guess`, slowly, whose state another process can take over."""

    recovery = "snapshot"

    @tool
    async def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        await asyncio.sleep(0.02)
        return await super().guess(number)

    def snapshot(self):
        return {"secret": self._secret, "found": self._found}

    def restore(self, state):
        self._secret, self._found = state["secret"], state["found"]


class BrokenReward(Guess):
    """`guess` whose reward raises for the number 3."""

    def reward(self, traj, row):
        if row["number"] == 3:
            raise KeyError("answer")
        return super().reward(traj, row)


class MasksAll(Guess):
    """`guess` of which no token is trained."""

    def reward(self, traj, row):
        traj.loss_mask_end = 0
        return super().reward(traj, row)


class NotANumber(Guess):
    """`guess` whose reward is no finite number."""

    def reward(self, traj, row):
        return float("nan")


class Hanging(Guess):
    """`guess` whose tool never returns, and can't be cancelled: it blocks the event loop of its process."""

    def __init__(self, seconds: float = 3600.0) -> None:
        super().__init__()
        self._seconds = seconds

    @tool
    async def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        time.sleep(self._seconds)
        return "higher"


class Slow(Guess):
    """`guess` whose tool takes `seconds`, cancellably."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    @tool
    async def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        await asyncio.sleep(self._seconds)
        return await super().guess(number)


class Uneven(Guess):
    """`guess` with quick members and stragglers: members 0 and 1 end with their first turn and make a file
    `<group>.<member>` in `directory`; the others' first guess waits for both files, and they never end by themselves.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    async def on_turn(self, traj):
        if traj.member < 2:
            return None
        quick = [os.path.join(self._directory, f"{traj.group}.{member}") for member in (0, 1)]
        while not all(os.path.exists(path) for path in quick):
            await asyncio.sleep(0.01)
        return TurnResult(messages=await self.call_tools(traj))

    def reward(self, traj, row):
        open(os.path.join(self._directory, f"{traj.group}.{traj.member}"), "x").close()
        return float(traj.member % 2)

    def on_truncated(self, traj, row, cause):
        return 0.25


class Babble(Env):
    """As many turns as the row says, whatever the model writes. The reward is the row's, else 0 or 1 by member."""

    def reset(self, row):
        self._turns = row["turns"]
        return row["prompt"]

    def on_turn(self, traj):
        return TurnResult(messages="w1 w2") if traj.num_turns < self._turns else None

    def reward(self, traj, row):
        return row.get("reward", float(traj.member % 2))


class RowRewards(Guess):
    """`guess` whose reward is the row's own, by member: `rewards` (text is text, but for nan and inf). A row without
    has 0 or 1 by member, so that every batch has a gradient. A row with `fails` raises in its first guess.
    """

    def reset(self, row):
        self._fails = row.get("fails", False)
        return super().reset(row)

    @tool
    async def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        if self._fails:
            raise InfrastructureError("this row is broken")
        return await super().guess(number)

    def reward(self, traj, row):
        if "rewards" not in row:
            return float(traj.member % 2)
        reward = row["rewards"][traj.member]
        return float(reward) if reward in ("nan", "inf") else reward


class Talker(Guess):
    """`guess` that always goes on; a truncated trajectory is worth the number of its messages."""

    async def on_turn(self, traj):
        return TurnResult(messages=[{"role": "tool", "content": "higher"}])

    def on_truncated(self, traj, row, cause):
        return float(len(traj.messages))


class Rewriter(Guess):
    """`guess` of three turns, each of which starts from a new prompt; what the third one says is not trained."""

    async def on_turn(self, traj):
        if traj.num_turns == 3:
            traj.loss_mask_end = traj.num_generated_tokens - traj.last_turn.num_tokens
            return None
        traj.rewrite([{"role": "user", "content": "find"}, {"role": "user", "content": str(traj.num_turns)}])
        return TurnResult()

    def reward(self, traj, row):
        return float(traj.member % 2)
