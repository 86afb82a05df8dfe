"""The directory of one run: its name, whether it is free, and its first file. What else it holds: `run_files.py`."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.config import Checkpointing
from pipeline.config_checks import check_path
from pipeline.errors import ConfigError
from pipeline.run_dir.resume_check import GOALS
from pipeline.run_dir.run_files import CONFIG, EVENTS, LOGS, METRICS
from pipeline.run_dir.synced_files import replace_file, sync_directory
from workers.machine.limits import refusal_in_words

# A directory with one of these holds a run.
RUN_FILES = (CONFIG, EVENTS, METRICS)


def check_run_dir(run_dir: str, where: str = "run_dir") -> None:
    """Refuse a directory that holds a run already, or that can't be made; makes nothing. Raises ConfigError."""
    path = Path(run_dir)
    found = [name for name in RUN_FILES if os.path.lexists(path / name)]
    if found:
        what = "a run already, or a model" if found == [CONFIG] else "a run already"
        raise ConfigError(
            f"{where} is {run_dir}, which holds {what} ({found[0]}); resume that run, or name another directory."
        )
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise ConfigError(f"{where} is {run_dir}, but {existing} is not a directory; name another one.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} is {run_dir}, but {existing} can't be written to; name another one.")


def make_default_run_dir(mode: str, now: time.struct_time, description: Mapping[str, Any]) -> Path:
    """`make_run_dir` for `runs/<time>-<mode>`, with a number behind it if a run started in the same second."""
    name = f"runs/{time.strftime('%Y%m%d-%H%M%S', now)}-{mode}"
    for number in count(1):
        path = Path(name if number == 1 else f"{name}-{number}")
        try:
            path.parent.mkdir(exist_ok=True)
            path.mkdir()  # whoever makes it has it: looking first would let two runs choose the same one
        except FileExistsError:
            if not path.parent.is_dir():
                raise ConfigError(f"{path.parent} is not a directory; name another place with run_dir.") from None
            continue
        except OSError as error:
            raise _not_made(path, error) from error
        return make_run_dir(str(path), description)
    raise AssertionError("count() has no end")


def make_run_dir(run_dir: str, description: Mapping[str, Any]) -> Path:
    """Make the run directory with `logs/` and config.json, and return it. Raises ConfigError if it holds a run.

    description: plain values, what config.json will hold.
    """
    check_run_dir(run_dir)
    path = Path(run_dir)
    try:
        (path / LOGS).mkdir(parents=True, exist_ok=True)
        # "x": of two runs that choose the same directory at once, one is refused.
        with open(path / CONFIG, "x", encoding="utf-8") as file:
            try:
                file.write(json.dumps(description, indent=2) + "\n")  # at once: hardly a kill leaves a part of it
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:  # a part of it would say that the directory holds a run
                (path / CONFIG).unlink()
                error.filename = file.name
                raise
        with suppress(PermissionError):  # where others' names may not be read
            sync_directory(path.parent)  # its own name; those in it are synced when the journal begins
    except OSError as error:
        raise _not_made(path, error) from error
    return path


def read_config(run_dir: Path | str) -> dict[str, Any]:
    """What config.json of a run's directory holds. Raises ConfigError when it is none."""
    path = Path(run_dir, CONFIG)
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; name the directory of a run.") from error
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{path} is no configuration of a run; name the directory of a run. If the one here was killed as it "
            "began, nothing of it is to be kept: remove the directory, and begin it anew."
        ) from None
    if not isinstance(record, dict) or "config" not in record:
        raise ConfigError(f"{path} is no configuration of a run; name the directory of a run.")
    return record


def record_changes(run_dir: Path, description: Mapping[str, Any]) -> None:
    """Put into config.json how far a resumed run is to go now, so that the next resume goes as far. The rest of
    `description` is as it was. To be called by whoever holds the run's lock. Raises ConfigError.
    """
    path, config = run_dir / CONFIG, description.get("config", {})
    stored = read_config(run_dir)
    changes = {name: config[name] for name in GOALS if name in config and config[name] != stored["config"].get(name)}
    if not changes:
        return
    stored["config"] |= changes
    try:
        replace_file(path, (json.dumps(stored, indent=2) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; see to that place.") from error


def _not_made(path: Path, error: OSError) -> ConfigError:
    limit = refusal_in_words(error)
    return ConfigError(limit or f"The run directory {path} can't be made: {error.strerror}; name another one.")


def refuse_other_place(resume: str | os.PathLike[str], run_dir: str | None) -> None:
    """Raise ConfigError when a run is to go on in one directory, and was given another."""
    if run_dir is not None and os.path.realpath(resume) != os.path.realpath(run_dir):
        raise ConfigError(
            f"resume is {resume}, and run_dir {run_dir}; a run goes on in its own directory: leave run_dir out, or, to "
            "go on with a copy, resume that."
        )


def one_run_dir(run_dir: Any, checkpointing: Checkpointing) -> str | None:
    """The place that a trainer was told, by itself or by its Checkpointing. Raises ConfigTypeError for what can name
    none, and ConfigError for two.
    """
    check_path(run_dir, "run_dir")
    if run_dir is None or checkpointing.run_dir is None or Path(run_dir) == Path(checkpointing.run_dir):
        return run_dir if run_dir is not None else checkpointing.run_dir
    raise ConfigError(
        f"run_dir is {run_dir}, and Checkpointing.run_dir {checkpointing.run_dir}; a run has one directory: leave one "
        "of them out."
    )
