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
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if self._stall.see(self._moves(), now - looked):
                await self._tell()
            looked = now

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
