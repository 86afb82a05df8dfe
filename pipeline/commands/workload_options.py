"""What options leave open of a workload: which task runs unless told otherwise, and where relative paths lead."""

import os
from collections.abc import Mapping
from typing import Any

from pipeline.commands.shared_config import language_of, tasks_speaking
from pipeline.model_directory import TINY_NAME
from pipeline.tasks import TASKS

OWN_SOURCES = ("env", "data", "reward", "agent")  # with one of these, no task is the default


def default_task(values: Mapping[str, Any]) -> str | None:
    """The task of a run, unless the user names one: the first that speaks as its model does; None where the user says
    in another way what is rolled out.
    """
    if any(values.get(name) is not None for name in OWN_SOURCES):
        return None
    return (tasks_speaking(language_of(values.get("model", TINY_NAME))) or list(TASKS))[0]


def absolute_sources(values: Mapping[str, Any]) -> dict[str, str]:
    """The values among these that name files, as absolute paths: another directory must not change what they mean."""
    found = {name: absolute_object(values[name]) for name in ("env", "reward", "agent") if values.get(name)}
    return found | {name: absolute_data(values[name]) for name in ("data", "eval_data") if values.get(name)}


def absolute_object(path: str) -> str:
    """`envs.py:Search` -> `/here/envs.py:Search`; a module's name stays as it is."""
    file, colon, name = path.rpartition(":")
    return f"{os.path.abspath(file)}:{name}" if colon and file.endswith(".py") else path


def absolute_data(path: str) -> str:
    """Of a file or a directory; `module:callable` stays as it is, unless something has that name."""
    return absolute_object(path) if ":" in path and not os.path.lexists(path) else os.path.abspath(path)
