"""Saves what a run's unfinished trajectories have come to, now and then and at its end."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from pipeline.rollouts.kept_members import pack_file
from pipeline.rollouts.rollouts import Rollouts
from pipeline.run_files import ROLLOUTS
from pipeline.run_warnings import warn_of_run
from pipeline.synced_files import replace_file


class RolloutSaver:
    """Of one run. every: seconds between two saves. A save that fails warns, once: nothing but work is lost by it."""

    def __init__(self, run_dir: Path, rollouts: Rollouts, every: float) -> None:
        self._path = run_dir / ROLLOUTS
        self._rollouts = rollouts
        self._every = every
        self._writing = asyncio.Lock()
        self._has_warned = False

    async def keep_saving(self, fail: Callable[[BaseException], None]) -> None:
        """Until it is cancelled. fail(error) ends the run, over what is no matter of the disk."""
        try:
            while True:
                await asyncio.sleep(self._every)
                await self.save()
        except Exception as error:  # nobody awaits this before the run's end
            fail(error)

    async def save(self) -> None:
        """What there is now; another thread waits for the disk."""
        async with self._writing:
            contents = self.contents()
            await asyncio.to_thread(self.write, contents)

    def contents(self) -> bytes:
        """What there is now, as the file holds it."""
        return pack_file(self._rollouts.saved())

    def write(self, contents: bytes) -> None:
        """Make it the file's contents; warns if that can't be."""
        try:
            replace_file(self._path, contents)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn_of_run(
                    f"{self._path} can't be written ({error.strerror}): trajectories under way will start again when "
                    "the run is resumed."
                )
