"""A run's checkpoints: RUN_DIR/checkpoints/version-<n>, each a whole model directory or not there.

A checkpoint is made under a temporary name: the model's own files, then the learner's float32 weights; all of it is
synced before the directory gets its name. Whatever ends a process meanwhile leaves only the temporary name, which
nobody reads and the next save removes.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pipeline.beside_weights import CONFIG
from pipeline.errors import ConfigError
from pipeline.events import EventLog
from workers.errors import CheckpointError
from workers.model_config import ModelConfig, layout
from workers.model_files.tensor_files import SINGLE, other_weights

FOLDER = "checkpoints"
TEMPORARY = ".tmp-"  # how an unfinished checkpoint's name begins
_NAME = re.compile(r"version-([0-9]+)")


def require_room(run_dir: str | os.PathLike[str], model: ModelConfig) -> None:
    """Raise ConfigError unless the disk of `run_dir`, which need not be there yet, has room for a checkpoint: better
    now than when the run is over.
    """
    path = Path(run_dir).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    needed, free = layout(model).num_bytes("float32"), shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"The run's last checkpoint will take {needed:,} bytes, and {existing} has {free:,} free; make room, or "
            "name a run_dir on another disk."
        )


class SavesWeights(Protocol):
    """What is needed of a run (`ActiveRun`); a protocol, so that finding checkpoints loads none of what runs need."""

    async def save_weights(self, version: int, path: str) -> None: ...


class Checkpoints:
    """Of one run. files: what a checkpoint holds beside the weights (`pipeline/beside_weights.py`)."""

    def __init__(self, run_dir: Path, files: Mapping[str, bytes], events: EventLog) -> None:
        self.latest: Path | None = None
        self._run_dir = run_dir
        self._folder = (run_dir / FOLDER).absolute()  # the learner writes there, too, from wherever it is
        self._files = files
        self._events = events

    async def save(self, run: SavesWeights, version: int) -> None:
        """Make the checkpoint of `version`, the learner's weights as they are now, and log it. Raises CheckpointError
        when that can't be; nothing is left of it then.
        """
        began = self._events.seconds()
        folder, name = self._folder, f"version-{version}"
        temporary, final = folder / (TEMPORARY + name), folder / name
        try:
            folder.mkdir(exist_ok=True)
            for leftover in folder.glob(TEMPORARY + "*"):
                shutil.rmtree(leftover)
            write_files(temporary, self._files)
            await run.save_weights(version, str(temporary / SINGLE))
            sync_directory(temporary)
            os.rename(temporary, final)
            sync_directory(folder)
        except OSError as error:
            raise CheckpointError(f"{final} can't be made: {error.strerror}; see to that place.") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.latest = self._run_dir / FOLDER / name
        seconds = round(self._events.seconds() - began, 6)
        self._events.log("checkpoint", version=version, path=f"{FOLDER}/{name}", seconds=seconds)


def latest_checkpoint(run_dir: Path | str) -> Path | None:
    """The newest version's; None if the run has none."""
    found = [(int(match[1]), path) for path in Path(run_dir, FOLDER).glob("*") if (match := _NAME.fullmatch(path.name))]
    return max(found)[1] if found else None


def checkpoint_version(path: Path | str) -> int:
    """By its name; 0 of a model directory that is no run's."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else 0


def is_run_directory(path: Path | str) -> bool:
    """Whether a run has been there: each begins with its audit log."""
    return os.path.isfile(os.path.join(path, "events.jsonl"))


def run_checkpoint(run_dir: Path | str) -> Path:
    """The newest checkpoint of a run directory. Raises ConfigError when there is none."""
    if not is_run_directory(run_dir):
        raise ConfigError(f"{run_dir} holds no events.jsonl; name the directory of a run.")
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        raise ConfigError(
            f"{run_dir} holds no checkpoint: a run saves its weights when it completes, or is stopped by Ctrl-C, not "
            "when it is killed; let one end so."
        )
    return checkpoint


def weights_directory(path: Path | str) -> Path:
    """The model directory that `path` means: of a run its newest checkpoint, else itself. Raises ConfigError."""
    if is_run_directory(path):
        return run_checkpoint(path)
    if not os.path.isfile(os.path.join(path, CONFIG)):
        neither = f"{path} is neither a run directory nor a model directory (it has no {CONFIG})."
        raise ConfigError(other_weights(path) or neither)
    return Path(path)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Make `directory` with these files in it, synced."""
    directory.mkdir()
    for name, contents in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
    for folder in {(directory / name).parent for name in files}:
        sync_directory(folder)


def sync_directory(directory: Path) -> None:
    """Have the names in it on disk, too: without that a crash may lose a file that was synced itself."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
