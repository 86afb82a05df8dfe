"""A run in which nothing moves: what every process is at goes into stall-<time>.json, and it continues or stops.

Nothing moves when for `stall_timeout` seconds no event but a wait was logged, no token went through a sampler's model,
and the learner did not get on with a batch. That may be well (one tool that takes long, and everybody waits for it) or
a wedge that would last for days; the file tells them apart. Only time that this process watched counts (see
`processes/stillness.py`).
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import RunError
from pipeline.processes.worker.stillness import MOST_SECONDS
from pipeline.user_warnings import warn_of_run

LOOK_SECONDS = 1.0
BLOCKED_SECONDS = 10.0  # for which a caller may let nothing else run unmentioned


class Stall:
    """The rule: `see` what moves, look by look; true once, when it has stood still for `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._moves: Any = None
        self._told = False
        self.seconds = 0.0

    def see(self, moves: Any, seconds: float) -> bool:
        """moves: equal to those of the look before when nothing has moved; `seconds` after it. None: nothing need move
        now.
        """
        if moves is None or moves != self._moves:
            self._moves, self._told, self.seconds = moves, False, 0.0
            return False
        self.seconds += min(seconds, MOST_SECONDS)
        if self._told or self.seconds < self._timeout:
            return False
        self._told = True
        return True


class StallWatch:
    """Of one run of a trainer."""

    def __init__(
        self,
        directory: Path,
        timeout: float,
        *,
        moves: Callable[[], Any],
        report: Callable[[], Awaitable[dict[str, Any]]],
        waits_for: Callable[[], str],
        fail: Callable[[BaseException], None],
        stops: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """directory: of the run. moves(): for `Stall.see`. report(): what the file holds. fail(error) ends the run, as
        a stall does if it `stops`.
        """
        self._directory = directory
        self._stall = Stall(timeout)
        self._moves = moves
        self._report = report
        self._waits_for = waits_for
        self._fail = fail
        self._stops = stops
        self._clock = clock
        self._looked = clock()
        self._told_of_blocking = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the running loop, for the length of the block."""
        task = asyncio.ensure_future(self._watch())
        task.add_done_callback(self._ended)
        try:
            yield
        finally:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A run that nobody watches any more must not go on as if somebody did."""
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    async def _watch(self) -> None:
        self._looked = self._clock()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Once a second."""
        before, self._looked = self._looked, self._clock()
        if self._stall.see(self._moves(), self._looked - before):
            await self._tell()

    @contextlib.contextmanager
    def with_caller(self, step: int) -> Iterator[None]:
        """While the caller has a step: warn, once a run, of one that lets nothing else in this loop run for long. A
        process that dies then has no successor, and nothing can say so, before the caller lets go.
        """
        began = self._clock()
        yield
        seconds = self._clock() - max(began, self._looked)
        if seconds >= BLOCKED_SECONDS and not self._told_of_blocking:
            self._told_of_blocking = True
            warn_of_run(
                f"The caller of this run let nothing else in its event loop run for {seconds:.0f} s after step {step}, "
                "or somebody had stopped this process: "
                "no process that died meanwhile was replaced, and samplers soon had nothing to do; await what takes "
                "long between two steps, asyncio.to_thread(function) say, in a loop over trainer.run(...)."
            )

    async def _tell(self) -> None:
        waits_for, seconds = self._waits_for(), self._stall.seconds
        state = {"seconds": round(seconds, 3), "waits_for": waits_for} | await self._report()
        path = self._directory / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.json"
        where = f"what every process is at is in {path}"
        try:
            path.write_text(json.dumps(state, indent=1, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            where = f"{path} can't be written: {error.strerror}"
        whom = f"it waits: {waits_for}" if waits_for else "the trainer waits for nobody"
        sentence = f"Nothing has moved in this run for {seconds:.0f} s: {whom}; {where}"
        if self._stops:
            self._fail(RunError(f'{sentence}. It ends, as on_stall is "stop".'))
        else:
            warn_of_run(f'{sentence}. It continues, as on_stall is "continue".')
