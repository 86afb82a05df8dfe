"""Environments whose code is that of a case (tests/data/cases), imported by real environment processes."""

import asyncio
import importlib.util
import os
from pathlib import Path

from pipeline.env import ToolCall, TurnResult, tool
from pipeline.environments.tool_calls import run_tool_call
from pipeline.tasks.guess import Guess

CASES = Path(__file__).parent.parent / "data" / "cases"


def stub(case):
    """The module of a case."""
    spec = importlib.util.spec_from_file_location(f"stub_of_{case}", CASES / case / "stub.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rewarded(Guess):
    """`guess` whose reward is that of a case, by the row's number `row`, plus the member's: every batch has a gradient.

    by_member: the case's function takes the member, too, and is called for row 2 only. directory: where the function
    is called only once a file `broken` is there.
    """

    def __init__(self, case: str, function: str = "reward", by_member: bool = False, directory: str = "") -> None:
        super().__init__()
        self._function = getattr(stub(case), function)
        self._by_member = by_member
        self._directory = directory

    def reward(self, traj, row):
        if self._directory and not os.path.exists(os.path.join(self._directory, "broken")):
            return float(traj.member)
        if self._by_member:
            return self._function(row["row"], traj.member, traj.text) if row["row"] == 2 else float(traj.member)
        return self._function(row["row"], traj.text) + traj.member


class Stuck(Guess):
    """`guess` in which member 3 of row 5 never gets past its first turn: HR37, where the turn blocks its process;
    with `waits` it awaits.
    """

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self._waits = waits
        self._step = stub("HR37").step

    def reset(self, row):
        self._row = row["row"]
        return super().reset(row)

    async def on_turn(self, traj):
        if self._waits and (self._row, traj.member) == (5, 3):
            await asyncio.sleep(10**6)
        if not self._waits:
            self._step(self._row, traj.member, traj.text)
        return await super().on_turn(traj)

    def reward(self, traj, row):
        return float(traj.member % 2)

    def on_truncated(self, traj, row, cause):
        return 0.5


class Blocking(Guess):
    """`guess` whose guesses block their thread, as HR73's tool does, where the row says so by `blocks`."""

    def reset(self, row):
        self._blocks = row.get("blocks", False)
        return super().reset(row)

    @tool
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        if self._blocks:
            stub("HR73").tool_block(number)
        return "higher" if self._secret > number else "lower"

    async def on_turn(self, traj):
        await run_tool_call(self, traj, ToolCall("guess", {"number": 1}))

    def reward(self, traj, row):
        return float(traj.member % 2)


class Flaky(Guess):
    """`guess` whose reward for row 2 fails the first time in each trajectory; the reward is the member's number."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def reward(self, traj, row):
        tried = os.path.join(self._directory, f"{traj.group}.{traj.member}")
        if row["row"] == 2 and not os.path.exists(tried):
            open(tried, "x").close()
            raise ConnectionError("service down")
        return float(traj.member)


class Loud(Guess):
    """`guess` of two turns, in each of which its tool answers with ten words, and a call of it can't be read. In row 2
    the tool prints 200,000 characters.
    """

    def reset(self, row):
        self._prints = row["row"] == 2
        return super().reset(row)

    @tool
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        if self._prints:
            print("x" * 200_000, flush=True)
        return " ".join(["higher"] * 10)

    async def on_turn(self, traj):
        calls = [ToolCall("guess", {"number": 1}), ToolCall("guess", {}, "what")]
        texts = [await run_tool_call(self, traj, call) for call in calls]
        messages = [{"role": "tool", "name": "guess", "content": text} for text in texts]
        return TurnResult(messages=messages) if traj.num_turns == 1 else None

    def reward(self, traj, row):
        return float(traj.member % 2)
