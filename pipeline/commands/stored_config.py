"""From a run's config.json back to the RunConfig that it was made with: the same values, of the same types.

All of it, or nothing: a resume must follow the whole recipe. (`run_record.py` takes what an evaluation can use, also
from runs of Python scripts and of other versions.)
"""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pipeline.commands.run_config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run_dir.run_directory import read_config
from pipeline.run_dir.run_files import CONFIG
from pipeline.version import VERSION
from pipeline.wording import shown
from shm.errors import HeadwayError

STARTED_IN = "directory"  # the key of config.json that tells where the run was started


class _Unreadable(Exception):
    """The record is not what this version writes; the message says where, and what is there."""


def read_run_config(run_dir: Path) -> tuple[RunConfig, str | None]:
    """How the run in `run_dir` was made, and the directory that it was started in (None: not recorded), which is from
    now on on Python's search path, for its modules may lie there. Raises ConfigError when the run wasn't made by the
    command line of this version, or can't be made so any more.
    """
    path, record = run_dir / CONFIG, read_config(run_dir)
    if not isinstance(record["config"], dict):
        raise ConfigError(f"{path} is no configuration of a run; name the directory of a run.")
    if record["config"].get("class") == "TrainerConfig":
        raise ConfigError(
            f"{run_dir} is a run of a Python script, which alone knows its environment and its rows; resume it there: "
            f"trainer.run(rows, steps, resume={str(run_dir)!r})."
        )
    started_in = record.get(STARTED_IN)
    if isinstance(started_in, str) and started_in not in sys.path:
        sys.path.append(started_in)
    try:
        return run_config_of(record["config"]), started_in
    except _Unreadable as error:
        raise ConfigError(
            f"{path}, written by Headway {record.get('headway')}, is no configuration that Headway {VERSION} can go on "
            f"with: {error}. Begin another run from its weights with --init {run_dir}."
        ) from error
    except HeadwayError as error:
        raise ConfigError(f"The recipe of {run_dir} can't be used any more: {_shortened(str(error))}") from error


def _shortened(sentence: str) -> str:
    """It may name a value of any length: nobody has typed it, and a terminal is small."""
    return sentence if len(sentence) <= 2000 else f"{sentence[:1200]} … {sentence[-600:]}"


def run_config_of(record: Mapping[str, Any]) -> RunConfig:
    """`plain(config)`, which has gone through JSON -> config."""
    return _dataclass(RunConfig, record, "config")


def _dataclass(cls: type, record: Any, where: str) -> Any:
    if not isinstance(record, dict) or record.get("class") != cls.__name__:
        raise _Unreadable(f"{where} is {shown(record)}, where a {cls.__name__} was looked for")
    kinds, names = get_type_hints(cls), [spec.name for spec in fields(cls)]
    for name in names:
        if name not in record:
            raise _Unreadable(f"{where}.{name} is missing")
    for name in record:
        if name not in ("class", *names):
            raise _Unreadable(f"{where}.{name} is unknown")
    return cls(**{name: _value(kinds[name], record[name], f"{where}.{name}") for name in names})


def _value(kind: Any, value: Any, where: str) -> Any:
    """`value` as the field's type `kind` says."""
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if is_dataclass(one):
            if isinstance(value, dict) and value.get("class") == one.__name__:
                return _dataclass(one, value, where)
        elif get_origin(one) is tuple:
            if isinstance(value, list):
                item, _ = get_args(one)  # all are tuple[X, ...]
                return tuple(_value(item, part, f"{where}[{number}]") for number, part in enumerate(value))
        elif get_origin(one) is Literal:
            if value in get_args(one):
                return value
        elif get_origin(one) is Mapping:
            if isinstance(value, dict):
                return value
        elif type(value) is one or (one is float and type(value) is int):
            return value
    raise _Unreadable(f"{where} is {shown(value)}")
