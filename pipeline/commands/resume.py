"""`run.py --resume RUN_DIR`: which run goes on, by its own recipe, and what of that can't be."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoints.saved import ended_in_start_up, find_checkpoints
from pipeline.commands.arguments import Given, read_arguments
from pipeline.commands.option_values import as_written, convert
from pipeline.commands.options import LATER, OPTIONS
from pipeline.commands.run_config import RunConfig
from pipeline.commands.stored_config import read_run_config
from pipeline.errors import ConfigError
from pipeline.resume_check import GOALS, nothing_left
from pipeline.run_files import EVENTS, METRICS, is_run_directory
from pipeline.run_lock import owner
from shm.errors import HeadwayError
from workers.machine.devices import resolve_devices

OPTION = "resume"
TAIL_BYTES = 1 << 20  # of a log, in which its last line is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A run to go on with. config: its own, with what the user changes. started_in: the directory that it was started
    in; None: not known. done: batches that it has trained so far. is_complete: nothing is left to train or to save.
    """

    run_dir: Path
    config: RunConfig
    started_in: str | None
    done: int
    is_complete: bool

    @property
    def nothing_to_do(self) -> str | None:
        """Why there is nothing left to do, in a sentence; None: there is."""
        if not self.is_complete:
            return None
        return (
            f"nothing to do: {self.run_dir} has trained {self.done} steps, and {self.config.steps} are asked for; to "
            "train on, ask for more by --steps."
        )


def is_resume(arguments: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == f"--{OPTION}" for word in arguments)


def parse_resume(arguments: Sequence[str]) -> Resume:
    """Arguments of run.py with --resume among them. Raises ConfigError (or another HeadwayError) with one sentence;
    starts and writes nothing.
    """
    flags = [option.name for option in OPTIONS.values() if option.type is bool]
    given = read_arguments(arguments, [*OPTIONS, "config", OPTION], LATER, flags)
    run_dir = given.pop(OPTION).value
    for name, item in given.items():
        if name not in GOALS:
            raise ConfigError(
                f"{item.where} can't be given with --resume: a run goes on by its own recipe, of which only "
                f"{' and '.join(OPTIONS[one].flag for one in GOALS)} may change; leave it out, or begin another "
                f"run from this one's weights with --init {run_dir}."
            )
    path = _find_run(run_dir)
    pid = owner(path)
    if pid is not None:
        raise ConfigError(
            f"{run_dir} belongs to a run that goes on (process {pid}); stop that one first, by Ctrl-C or SIGTERM."
        )
    config, started_in = read_run_config(path)
    found, broken = find_checkpoints(path)  # of the broken the run itself warns
    if not found and not ended_in_start_up(path):
        lacking = "".join(f" (of version {version} {why})" for version, why in broken.items())
        raise ConfigError(
            f"{run_dir} holds no checkpoint to go on from{lacking}: a run saves its first one when its processes have "
            "started; begin it anew in another directory."
        )
    _check_device(config, run_dir)
    config = _changed(config, given)
    step, status = last_line(path / METRICS), last_line(path / EVENTS).get("status")
    done = step.get("step", 0)
    if type(done) is not int:
        raise ConfigError(f"{path / METRICS} is damaged: its last line tells of no step; restore it.")
    return Resume(
        run_dir=path,
        config=config,
        started_in=started_in,
        done=done,
        is_complete=nothing_left(
            steps=config.steps,
            batches=done,
            is_saved=bool(found) and found[0].version == step.get("model_step", 0),
            is_measured=status == "completed" or config.eval_every is None,  # a stop may have cut the last one short
            status=status,
        ),
    )


def _find_run(run_dir: str) -> Path:
    path = Path(run_dir)
    if not os.path.lexists(path):
        raise ConfigError(f"--resume is {run_dir}, but there is no such directory; name the directory of a run.")
    if not path.is_dir():
        raise ConfigError(f"--resume is {run_dir}, which is no directory; name the directory of a run.")
    if not is_run_directory(path):
        inside = next((parent for parent in path.absolute().parents[:2] if is_run_directory(parent)), None)
        hint = f"did you mean {inside}?" if inside is not None else "name the directory of a run."
        raise ConfigError(f"--resume is {run_dir}, which holds no run (no {EVENTS}); {hint}")
    return path


def _changed(config: RunConfig, given: dict[str, Given]) -> RunConfig:
    values = {OPTIONS[name].field: convert(OPTIONS[name], item) for name, item in given.items()}
    try:
        return replace(config, **values)
    except HeadwayError as error:
        raise ConfigError(as_written(str(error), given)) from error


def _check_device(config: RunConfig, run_dir: str) -> None:
    try:
        resolve_devices(config.device, config.samplers)
    except HeadwayError as error:
        raise ConfigError(
            f"{run_dir} computes on {config.device}, which can't be here: {error} Its device can't change; resume it "
            f"on such a machine, or begin another run from its weights with --init {run_dir}."
        ) from error


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a log; empty when there is none. A line that breaks off ends what was written."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; make it readable.") from error
    for line in reversed(lines):
        if line.endswith(b"\n"):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError(f"{path} is damaged: its last line is no JSON; restore it.") from None
            return found if isinstance(found, dict) else {}
    return {}
