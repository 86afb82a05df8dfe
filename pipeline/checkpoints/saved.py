"""The checkpoints that a run directory holds: which are complete, and which of them a reader takes.

RUN_DIR/checkpoints/version-<n> is one if its marker says so (`marker.py`). What else is there is passed over, with a
warning if it would have been the newest; so is one whose weights are damaged, where they are to be loaded.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoints.marker import (
    MARKER,
    Incomplete,
    Marker,
    check_complete,
    check_contents,
    read_marker,
    read_state,
)
from pipeline.checkpoints.model_files import CONFIG
from pipeline.errors import ConfigError
from pipeline.journal.journal_files import is_blank, path_of
from pipeline.run_dir.run_files import CHECKPOINTS, EVENTS, FIRST_JOURNAL_FILE, JOURNAL, is_run_directory
from pipeline.run_dir.run_files import CONFIG as RUN_CONFIG
from pipeline.run_dir.synced_files import remove, sync_directory
from pipeline.user_warnings import warn_of_run
from workers.errors import CheckpointError
from workers.model_files.tensor_files import OPTIMIZER, other_weights

_NAME = re.compile(r"version-(0|[1-9][0-9]{0,9})")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete one."""

    version: int
    path: Path  # a model directory
    marker: Marker

    @property
    def journal(self) -> int:
        """The ordinal of the journal's file that goes on where its state ends."""
        return self.marker.journal

    def state(self) -> dict[str, Any]:
        """What the trainer's state was, as plain values. Raises CheckpointError if that can't be read."""
        return read_state(self.path, self.marker)

    def check_contents(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Compare every file with what was saved. Raises Incomplete, and Cancelled; blocks while it reads."""
        check_contents(self.path, self.marker, self.marker.files, is_cancelled)


def complete_checkpoints(run_dir: Path | str) -> list[SavedCheckpoint]:
    """Newest first. A newer one that is incomplete is passed over with a warning that names what it lacks."""
    found, broken = find_checkpoints(run_dir)
    for version, why in broken.items():
        if not found or version > found[0].version:
            path = Path(run_dir, CHECKPOINTS, f"version-{version}")
            instead = f"Version {found[0].version} is used in its place" if found else "There is no older one"
            warn_of_run(f"The checkpoint {path} is incomplete: {why}. {instead}.")
    return found


def find_checkpoints(run_dir: Path | str) -> tuple[list[SavedCheckpoint], dict[int, str]]:
    """(complete ones, newest first; of the others, by version, what they lack). Raises CheckpointError when the folder
    can't be read.
    """
    folder = Path(run_dir, CHECKPOINTS)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror}; make it readable.") from error
    found, broken = [], {}
    by_version = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
    for version, name in sorted(by_version.items(), reverse=True):
        path = folder / name
        try:
            found.append(SavedCheckpoint(version, path, check_complete(path, version)))
        except Incomplete as error:
            broken[version] = str(error)
    return found, broken


def latest_checkpoint(run_dir: Path | str) -> Path | None:
    """The newest one whose model can be loaded; None if the run has none. Blocks while it reads the weights; a newer
    one whose weights are damaged is passed over with a warning.
    """
    return _latest_model(complete_checkpoints(run_dir))


def _latest_model(found: list[SavedCheckpoint]) -> Path | None:
    for number, saved in enumerate(found):
        try:
            check_model(saved.path, saved.marker)
        except Incomplete as error:
            older = found[number + 1 :]
            instead = f"Version {older[0].version} is used in its place" if older else "There is no older one"
            warn_of_run(f"The checkpoint {saved.path} is damaged: {error}. {instead}.")
        else:
            return saved.path
    return None


def check_model(directory: Path, marker: Marker) -> None:
    """Compare with what was saved all that a model is loaded from: everything but the optimizer's state. Raises
    Incomplete.
    """
    check_contents(directory, marker, (name for name in marker.files if name != OPTIMIZER))


def refuse_damaged(directory: Path) -> None:
    """Raise ConfigError unless a model directory that a run saved, or a copy of one, holds what was saved; another one
    is let through.
    """
    if not os.path.lexists(directory / MARKER):
        return
    try:
        check_model(directory, read_marker(directory))
    except Incomplete as error:
        raise ConfigError(
            f"The checkpoint {directory} is damaged: {error}. Name another one; or, if it was changed on purpose, "
            f"remove its {MARKER}."
        ) from error


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint of one's own run another name, under which nobody takes it for one; returns that.
    Raises OSError.
    """
    aside = path.with_name(f"damaged-{path.name}")
    remove(aside)  # of the same version, from before
    os.rename(path, aside)
    sync_directory(path.parent)
    return aside


def checkpoint_version(path: Path | str) -> int:
    """By its name; 0 of a model directory that is no run's."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else 0


def goes_on_from_start(run_dir: Path | str) -> bool:
    """Whether a run has no complete checkpoint, and can go on from its own first weights: it ended in its start-up, or
    could save nothing, and its journal has all that was decided.
    """
    if not os.path.isfile(os.path.join(run_dir, RUN_CONFIG)):
        return False
    found, _ = find_checkpoints(run_dir)
    return not found and (is_blank(run_dir) or path_of(Path(run_dir, JOURNAL), FIRST_JOURNAL_FILE).is_file())


def require_checkpoints(run_dir: Path | str) -> list[SavedCheckpoint]:
    """`complete_checkpoints` of a run directory that has any. Raises ConfigError."""
    if not is_run_directory(run_dir):
        raise ConfigError(f"{run_dir} holds no {EVENTS}; name the directory of a run.")
    found = complete_checkpoints(run_dir)
    if not found:
        raise ConfigError(
            f"{run_dir} holds no complete checkpoint: a run saves its weights every --weights-every updates and when "
            "it ends, or is stopped by Ctrl-C; continue it with --resume, or let one go on for longer."
        )
    return found


def run_checkpoint(run_dir: Path | str) -> Path:
    """The newest checkpoint of a run directory whose model can be loaded (see `latest_checkpoint`). Raises ConfigError
    when there is none.
    """
    checkpoint = _latest_model(require_checkpoints(run_dir))
    if checkpoint is None:
        raise ConfigError(f"All checkpoints of {run_dir} are damaged; put a good copy of one in its place.")
    return checkpoint


def weights_directory(path: Path | str) -> Path:
    """The model directory that `path` means: of a run its newest checkpoint, else itself. Raises ConfigError."""
    if is_run_directory(path):
        return run_checkpoint(path)
    if not os.path.isfile(os.path.join(path, CONFIG)):
        neither = f"{path} is neither a run directory nor a model directory (it has no {CONFIG})."
        raise ConfigError(other_weights(path) or neither)
    return Path(path)
