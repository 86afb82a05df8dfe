"""What options leave open of a workload: which task runs unless told otherwise, what it starts from, and where relative
paths lead.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.commands.run_config import task_budget, task_defaults
from pipeline.commands.shared_config import language_of, tasks_speaking
from pipeline.commands.workload_config import EnvironmentTable
from pipeline.models.model_directory import TINY_NAME
from pipeline.tasks import TASKS
from shm.errors import HeadwayError
from workers.import_path import is_file
from workers.model_files.config import read_model_config

OWN_SOURCES = ("env", "data", "reward", "agent")  # with one of these, no task is the default


def default_task(values: Mapping[str, Any]) -> str | None:
    """The task of a run, unless the user names one: the first that speaks as its model does; None where the user says
    in another way what is rolled out.
    """
    if any(values.get(name) is not None for name in OWN_SOURCES):
        return None
    return (tasks_speaking(language_of(values.get("model", TINY_NAME))) or list(TASKS))[0]


def workload_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Option values by name that a run of `values`' task, or of none, starts from."""
    task, model = values.get("task"), values.get("model", TINY_NAME)
    return task_defaults(task, language_of(model)) | fitting_budget(task, model)


def fitting_budget(task: str | None, model: str) -> dict[str, int]:
    """What of `Budget` a task asks for, or where there is none what suits most, within the model's positions."""
    budget = task_budget(task, language_of(model))
    if task is None and model != TINY_NAME:
        with contextlib.suppress(HeadwayError):  # of a model that can't be used: it is refused when it is opened
            positions = read_model_config(model).max_positions
            budget["max_context_tokens"] = min(budget["max_context_tokens"], positions)
    return budget


def with_holdout(tables: tuple[EnvironmentTable, ...], holdout: int | float | None) -> tuple[EnvironmentTable, ...]:
    """A mix in which those environments hold out so much whose table says nothing of it."""
    return tuple(
        replace(table, holdout=holdout)
        if table.task is None and table.holdout is None and table.eval_data is None
        else table
        for table in tables
    )


def absolute_sources(values: Mapping[str, Any]) -> dict[str, str]:
    """The values among these that name files, as absolute paths: another directory must not change what they mean."""
    found = {
        name: absolute_object(values[name]) for name in ("env", "reward", "agent", "loss_function") if values.get(name)
    }
    return found | {name: absolute_data(values[name]) for name in ("data", "eval_data") if values.get(name)}


def absolute_object(path: str) -> str:
    """`envs.py:Search` -> `/here/envs.py:Search`; a module's name stays as it is."""
    file, colon, name = path.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(file))}:{name}" if colon and is_file(file) else path


def absolute_data(path: str) -> str:
    """Of a file or a directory; `module:callable` stays as it is, unless something has that name."""
    return absolute_object(path) if ":" in path and not os.path.lexists(path) else os.path.abspath(path)
