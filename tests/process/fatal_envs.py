"""Environments that hang or kill their process, imported by real environment processes."""

import ctypes
import functools
import os
import re
import signal
import subprocess
import time

from pipeline.environments.tool_threads import TOOL_THREADS
from pipeline.tasks.guess import Guess

FOREVER = 3600.0


def backtrack():
    """For longer than any test, in one call that never lets go of the interpreter."""
    re.match(r"(a|a)*$", "a" * 60 + "b")


def spin():
    while True:
        pass


IN_THREADS = {"sleeping thread": functools.partial(time.sleep, FOREVER), "backtracking thread": backtrack}
ON_LOOP = {
    "spinning": spin,
    "exit": functools.partial(os._exit, 3),
    "halt": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": functools.partial(ctypes.string_at, 0),
}


class Fatal(Guess):
    """`guess` of which member 0 does what its row's `fatal` says, in its first turn; with `once`, only the first time
    (a file of that name in `directory` remembers). The reward is 0 or 1 by member, so that every batch has a gradient.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def reset(self, row):
        self._row = row
        return super().reset(row)

    async def on_turn(self, traj):
        fatal = self._row.get("fatal")
        if fatal is not None and traj.member == 0 and self._is_due():
            if self._row.get("leaves"):  # a process that this one has started, as sandboxes start theirs
                child = subprocess.Popen(["/bin/sleep", str(FOREVER)], start_new_session=True, env={})
                with open(os.path.join(self._directory, self._row["leaves"]), "w", encoding="utf-8") as file:
                    file.write(str(child.pid))
            if fatal in IN_THREADS:
                await TOOL_THREADS.run(IN_THREADS[fatal])
            ON_LOOP[fatal]()
        return await super().on_turn(traj)

    def reward(self, traj, row):
        return float(traj.member % 2)

    def _is_due(self):
        if "once" not in self._row:
            return True
        try:
            open(os.path.join(self._directory, self._row["once"]), "x").close()
        except FileExistsError:
            return False
        return True


class Remembering(Fatal):
    """The same with snapshots: what a process takes down goes on elsewhere. The number of turns is in itself alone."""

    recovery = "snapshot"

    def reset(self, row):
        self._turns = 0
        return super().reset(row)

    async def on_turn(self, traj):
        if self._turns != traj.num_turns - 1:
            raise RuntimeError(f"{self._turns} turns are remembered of {traj.num_turns}")
        outcome = await super().on_turn(traj)
        self._turns += 1
        return outcome

    def snapshot(self):
        return {"row": self._row, "secret": self._secret, "found": self._found, "turns": self._turns}

    def restore(self, state):
        self._row, self._secret, self._found = state["row"], state["secret"], state["found"]
        self._turns = state["turns"]
