"""A run's own checkpoints: when one is due, how it is made, and which are removed.

One is made under a temporary name: the model's own files and the trainer's state, then by the learner its float32
weights and the optimizer's, and last the marker, which names them all; everything is synced before the directory gets
its name. Whatever ends a process meanwhile leaves only the temporary name, which nobody reads and the next save
removes.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline.checkpoints.kept import Kept, what_stays
from pipeline.checkpoints.marker import JOURNAL, MARKER, STATE, make_marker, pack_state
from pipeline.checkpoints.saved import find_checkpoints
from pipeline.config import Checkpointing
from pipeline.errors import ConfigError
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.run_files import CHECKPOINTS
from pipeline.run_dir.synced_files import TEMPORARY, remove, sync_directory, write_file, write_files
from pipeline.user_warnings import warn, warn_of_run
from workers.errors import CheckpointError
from workers.machine.disk_space import no_space, require_space
from workers.model_config import ModelConfig, checkpoint_bytes
from workers.model_files.checksum import checksum_of
from workers.model_files.tensor_files import OPTIMIZER, SINGLE

Value = TypeVar("Value")


class SavesWeights(Protocol):
    """What is needed of a run (`ActiveRun`); a protocol, so that saving loads none of what runs need."""

    async def save_weights(self, version: int, path: str, optimizer_path: str) -> tuple[int, int]: ...


def require_room(run_dir: str | os.PathLike[str], model: ModelConfig, config: Checkpointing) -> None:
    """Raise ConfigError unless the disk of `run_dir`, which need not be there yet, has room for a checkpoint: better
    now than when the run is over. Warn unless it has room for as many as may be there at a time.
    """
    path = Path(run_dir).absolute()
    existing = next(folder for folder in (path / CHECKPOINTS, path, *path.parents) if folder.is_dir())
    needed, free = checkpoint_bytes(model), shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"The run's last checkpoint will take {needed:,} bytes, and {existing} has {free:,} free; make room, or "
            "name a run_dir on another disk."
        )
    more = config.keep + config.keep_best + 1 - len(find_checkpoints(run_dir)[0])  # 1: the one that is being made
    if free < more * needed:
        warn(
            f"{existing} has {free:,} bytes free, and the run will save up to {more} checkpoints of {needed:,} bytes "
            "before it removes any; make room, or keep fewer."
        )


class Checkpoints:
    """Of one run. files: what a checkpoint holds beside the weights (`model_files.py`). learner_bytes: what
    the learner will write of each (`checkpoint_bytes`), for which room is asked before.
    """

    def __init__(
        self,
        run_dir: Path,
        files: Mapping[str, bytes],
        events: EventLog,
        config: Checkpointing,
        *,
        learner_bytes: int = 0,
    ) -> None:
        saved, _ = find_checkpoints(run_dir)
        self.latest: Path | None = saved[0].path if saved else None
        self.longest_save = 0.0  # seconds
        self.config = config
        self._run_dir = run_dir
        self._folder = (run_dir / CHECKPOINTS).absolute()  # the learner writes there, too, from wherever it is
        self._files = files
        self._events = events
        self._learner_bytes = learner_bytes
        # The version that the latest save is, or was to be, of; None: a first one, with which a run begins, is to come.
        self._tried: int | None = saved[0].version if saved else None
        self._rewards: dict[int, float] = {}
        self._unscored: set[int] = set()

    def due(self, version: int) -> bool:
        """Whether `version`, which the learner has now, is to be saved while the run goes on."""
        return self._tried is None or version >= self._tried + self.config.weights_every

    def damaged(self, paths: Collection[Path], instead: Path | None) -> None:
        """These checkpoints are not what was saved, and the run goes on from `instead`, if from any."""
        if self.latest in paths:
            self.latest = instead

    def has(self, version: int) -> bool:
        """Whether it has a complete checkpoint: then none is made again, for the journal tells what came after."""
        return any(saved.version == version for saved in find_checkpoints(self._run_dir)[0])

    async def save(self, run: SavesWeights, version: int, state: Mapping[str, Any], *, may_fail: bool = False) -> None:
        """Make the checkpoint of `version`, the learner's weights as they are now, and log it; nothing if it is there.

        state: plain values, read before the first await; state["journal"] is the ordinal of the journal's file that was
        begun with it. Raises CheckpointError when it can't be made; may_fail: warns instead. Nothing is left of it
        then, and older ones are as they were.
        """
        packed = pack_state(state)
        try:
            if self.has(version):
                return
            self._tried = version
            await self._save(run, version, packed, state[JOURNAL])
        except CheckpointError as error:
            if not may_fail:
                raise
            kept = f"{self.latest} is as it was" if self.latest is not None else "there is none yet"
            again = version + self.config.weights_every
            warn_of_run(
                f"No checkpoint of version {version}: {error} The run goes on, and saves at {again} next; {kept}."
            )

    def evaluating(self, version: int) -> None:
        """An evaluation of `version` has begun: with `keep_best` its checkpoint stays until `scored` or the run's
        end.
        """
        self._unscored.add(version)

    def scored(self, version: int, reward_mean: float) -> None:
        """The mean held-out reward of `version`, for `keep_best`."""
        self._unscored.discard(version)
        self._rewards[version] = reward_mean

    async def prune(self, oldest_needed: int) -> int:
        """Remove what nobody needs; see `what_stays`. Returns the ordinal of the oldest file of the journal that is
        needed: those before it may go. What can't be removed is warned of, and stays.
        """
        stays, surplus = self._what_stays(oldest_needed)
        if surplus:
            await _in_thread(lambda: self._remove(surplus))
        return stays.journal

    # --- inside --------------------------------------------------------------------------------------------------

    def _what_stays(self, oldest_needed: int) -> tuple[Kept, list[Path]]:
        """And the checkpoints that don't. What is on disk now counts: its owner may have removed some by hand."""
        saved, _ = find_checkpoints(self._run_dir)
        stays = what_stays(
            {one.version: one.journal for one in saved},
            oldest_needed=oldest_needed,
            keep=self.config.keep,
            keep_best=self.config.keep_best,
            rewards=self._rewards,
            unscored=self._unscored,
        )
        # A link was made by someone else, who knows what for.
        return stays, [one.path for one in saved if one.version not in stays.versions and not one.path.is_symlink()]

    def _remove(self, surplus: list[Path]) -> None:
        for path in surplus:
            temporary = self._folder / (TEMPORARY + path.name)
            try:
                os.rename(path, temporary)  # so that nobody takes a half removed one for a checkpoint
                remove(temporary)
            except OSError as error:
                warn_of_run(f"The old checkpoint {path} can't be removed: {error.strerror}; it stays.")

    async def _save(self, run: SavesWeights, version: int, state: bytes, journal: int) -> None:
        began = self._events.seconds()
        name = f"version-{version}"
        temporary, final = self._folder / (TEMPORARY + name), self._folder / name
        try:
            await _in_thread(lambda: self._begin(temporary, state))
            weights, optimizer = await run.save_weights(version, str(temporary / SINGLE), str(temporary / OPTIMIZER))
            sums = {name: checksum_of(data) for name, data in (*self._files.items(), (STATE, state))}
            sums |= {SINGLE: weights, OPTIMIZER: optimizer}
            await _in_thread(lambda: self._finish(temporary, final, sums, version, journal))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_space(self._folder, self._needed(state)) from error
            raise CheckpointError(f"{final} can't be made: {error.strerror}; see to that place.") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.latest = self._run_dir / CHECKPOINTS / name
        seconds = round(self._events.seconds() - began, 6)
        self.longest_save = max(self.longest_save, seconds)
        self._events.log("checkpoint", version=version, path=f"{CHECKPOINTS}/{name}", seconds=seconds)

    def _needed(self, state: bytes) -> int:
        """Bytes of a checkpoint, but for the few of its marker."""
        return self._learner_bytes + sum(map(len, self._files.values())) + len(state)

    def _begin(self, temporary: Path, state: bytes) -> None:
        """Everything that the learner doesn't write."""
        if not self._folder.is_dir():
            self._folder.mkdir()
            sync_directory(self._folder.parent)
        for name in os.listdir(self._folder):
            if name.startswith(TEMPORARY):
                remove(self._folder / name)
        require_space(self._folder, self._needed(state))
        write_files(temporary, {**self._files, STATE: state})

    def _finish(self, temporary: Path, final: Path, sums: Mapping[str, int], version: int, journal: int) -> None:
        """The marker, then the name. sums: the files' names, with their checksums."""
        for found in os.listdir(temporary):  # what a learner has left that died while it wrote
            if not any(Path(name).parts[0] == found for name in sums):
                remove(temporary / found)
        write_file(temporary / MARKER, make_marker(temporary, sums, version, journal))
        sync_directory(temporary)
        broken = self._folder / f"{TEMPORARY}broken-{final.name}"
        if os.path.lexists(final):  # an incomplete one
            os.rename(final, broken)
        os.rename(temporary, final)
        sync_directory(self._folder)
        with suppress(OSError):  # the next save tries again
            remove(broken)


async def _in_thread(function: Callable[[], Value]) -> Value:
    """What a disk may take long for, beside the loop. A cancellation waits for its end: nobody removes files under
    it.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
