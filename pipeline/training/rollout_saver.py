"""Saves what a run's unfinished trajectories have come to, now and then and at its end."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import RunError
from pipeline.rollouts.kept_members import pack_file
from pipeline.rollouts.rollouts import Rollouts
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.run_files import ROLLOUTS
from pipeline.run_dir.synced_files import replace_file
from pipeline.user_warnings import warn_of_run


class Contents(NamedTuple):
    """number: which of the run's saves it is."""

    number: int
    packed: bytes


class RolloutSaver:
    """Of one run. every: seconds between two saves. A save that fails warns, once: nothing but work is lost by it.

    A thread that writes goes on when whoever waits for it is cancelled. So one writes at a time, and none an older save
    over a newer one.
    """

    def __init__(self, run_dir: Path, rollouts: Rollouts, events: EventLog, every: float) -> None:
        self._path = run_dir / ROLLOUTS
        self._rollouts = rollouts
        self._events = events
        self._every = every
        self._saving = asyncio.Lock()
        self._writing = threading.Lock()
        self._num_packed = self._num_written = 0
        self._is_over = False
        self._has_warned = False
        self._keeping: asyncio.Task[None] | None = None

    def start(self, fail: Callable[[BaseException], None]) -> None:
        """Save now and then from now on. fail(error) ends the run, over what is no matter of the disk."""
        self._keeping = asyncio.create_task(self._keep_saving(fail))

    async def stop_rollouts(self, *, is_last: bool) -> None:
        """Cut them off and save no more; is_last: but for what they have come to."""
        contents = None
        if is_last:
            with contextlib.suppress(RunError):  # the log can't be written, which its own end tells
                contents = self.last_contents()
        keeping = [self._keeping] if self._keeping is not None else []
        for task in keeping:
            task.cancel()
        try:
            # At once, and nothing is awaited behind it: of a run that is left to the end of its loop, this is closed.
            stopped, *_ = await asyncio.gather(self._rollouts.stop(), *keeping, return_exceptions=True)
        finally:
            if contents is not None:
                self.write(contents)
        if stopped is not None:
            raise stopped

    async def _keep_saving(self, fail: Callable[[BaseException], None]) -> None:
        try:
            while True:
                await asyncio.sleep(self._every)
                await self.save()
        except Exception as error:  # nobody awaits this before the run's end
            fail(error)

    async def save(self) -> None:
        """What there is now; another thread waits for the disk. Nothing after `last_contents`."""
        async with self._saving:
            if not self._is_over:
                await asyncio.to_thread(self.write, self.contents())

    def last_contents(self) -> Contents:
        """What there is now, right before all of it is cut off: what is left then is nothing to go on from."""
        self._is_over = True
        return self.contents()

    def contents(self) -> Contents:
        """What there is now."""
        self._num_packed += 1
        self._events.sync()  # so the file has nothing that the log lacks: it might be taken for a later attempt's
        return Contents(self._num_packed, pack_file(self._rollouts.saved()))

    def write(self, contents: Contents) -> None:
        """Make it the file's contents, unless a newer save is; warns if that can't be."""
        try:
            with self._writing:
                if contents.number > self._num_written:
                    replace_file(self._path, contents.packed)
                    self._num_written = contents.number
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn_of_run(
                    f"{self._path} can't be written ({error.strerror}): trajectories under way will start again when "
                    "the run is resumed."
                )
