"""`run.py --resume RUN_DIR`: which run goes on, by its own recipe, and what of that can't be."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.checkpoints.saved import find_checkpoints, goes_on_from_start
from pipeline.commands.arguments import Given, read_arguments
from pipeline.commands.option_values import as_written, convert
from pipeline.commands.options import LATER_OPTIONS, OPTIONS
from pipeline.commands.run_config import RunConfig
from pipeline.commands.stored_config import read_run_config
from pipeline.errors import ConfigError
from pipeline.run_dir.resume_check import GOALS, last_line, nothing_left
from pipeline.run_dir.run_files import EVENTS, LOGS, METRICS, is_run_directory
from pipeline.run_dir.run_lock import owner
from shm.errors import HeadwayError
from workers.machine.devices import resolve_devices

OPTION = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A run to go on with. config: its own, with what the user changes. started_in: the directory that it was started
    in; None: not known. done: batches that it has trained so far. looks_complete: nothing is left to train or to save,
    as far as its logs tell; the trainer, whose directory it is then, says so for good (`AsyncTrainer.was_complete`).
    """

    run_dir: Path
    config: RunConfig
    started_in: str | None
    done: int
    looks_complete: bool

    @property
    def nothing_to_do(self) -> str:
        """What is said of a run that is complete."""
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
    given = read_arguments(arguments, [*OPTIONS, "config", OPTION], LATER_OPTIONS, flags)
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
    if not found and not goes_on_from_start(path):
        lacking = "".join(f" (of version {version} {why})" for version, why in broken.items())
        remedy = (
            "put a good copy of that back and resume, or begin another run"
            if broken
            else "a run saves its first one when its processes have started; begin it anew in another directory"
        )
        raise ConfigError(f"{run_dir} holds no checkpoint to go on from{lacking}: {remedy}.")
    _check_device(config, run_dir)
    config = _changed(config, given, path)
    return Resume(
        run_dir=path,
        config=config,
        started_in=started_in,
        done=batches_done(path),
        looks_complete=looks_complete(path, config.steps, evaluates=config.eval_every is not None),
    )


def batches_done(run_dir: Path) -> int:
    """By metrics.jsonl. Raises ConfigError."""
    path = Path(run_dir, METRICS)
    done = last_line(path).get("step", 0)
    if type(done) is not int:
        raise ConfigError(f"{path} is damaged: its last line tells of no step; restore it.")
    return done


def looks_complete(run_dir: Path, steps: int, *, evaluates: bool) -> bool:
    """Whether nothing is left of a run of `steps` batches, by the last lines of its logs alone. It may miss that where
    the journal, which the trainer asks (`Resumption.is_complete`), knows of more. Raises ConfigError.
    """
    found, _ = find_checkpoints(run_dir)
    status = last_line(Path(run_dir, EVENTS)).get("status")
    return nothing_left(
        steps=steps,
        batches=batches_done(run_dir),
        is_saved=bool(found) and found[0].version == last_line(Path(run_dir, METRICS)).get("model_step", 0),
        is_measured=status == "completed" or not evaluates,  # a stop may have cut the last one short
        status=status,
    )


def _find_run(run_dir: str) -> Path:
    path = Path(run_dir)
    if not os.path.lexists(path):
        raise ConfigError(f"--resume is {run_dir}, but there is no such directory; name the directory of a run.")
    if not path.is_dir():
        raise ConfigError(f"--resume is {run_dir}, which is no directory; name the directory of a run.")
    if not is_run_directory(path) and not goes_on_from_start(path):
        if set(os.listdir(path)) <= {LOGS}:
            raise ConfigError(
                f"--resume is {run_dir}, which holds nothing yet, or a run that was killed as it began; begin it anew, "
                f"with --run-dir {run_dir}."
            )
        inside = next((parent for parent in path.absolute().parents[:2] if is_run_directory(parent)), None)
        hint = f"did you mean {inside}?" if inside is not None else "name the directory of a run."
        raise ConfigError(f"--resume is {run_dir}, which holds no run (no {EVENTS}); {hint}")
    return path


def _changed(config: RunConfig, given: dict[str, Given], run_dir: Path) -> RunConfig:
    """As the user changes it; the run is where it is now."""
    values = {OPTIONS[name].field: convert(OPTIONS[name], item) for name, item in given.items()}
    try:
        return replace(config, run_dir=str(run_dir), **values)
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
