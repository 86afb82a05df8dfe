"""An event loop whose time jumps to the next timer as soon as nothing is left to do: hours pass in no time, exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _NoWait(selectors.SelectSelector):
    """Never waits: the loop's own timers are the only events."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("Everything waits and no timer is set: what was played has come to a standstill.")
        self._loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` counts from 0 and moves only by timers. All timers of one time run in one tick."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self.now


def run(main: Coroutine) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
