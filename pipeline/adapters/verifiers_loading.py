"""From a taskset's name and config to a verifiers environment that plays in this process, and to its rows."""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1 import runtimes
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils import loaders

from pipeline.adapters import verifiers_harness
from pipeline.adapters.verifiers_runtime import TiedRuntime
from pipeline.errors import ConfigError
from pipeline.user_code.failures import LOGGER, failure_text
from pipeline.wording import shown

HARNESS = "headway_chat"  # verifiers finds harnesses as top-level modules only
NO_HARNESS = "bash"  # what verifiers falls back to where a taskset brings none; it needs uv and the network
LOOPBACK = "127.0.0.1,localhost"

_log = logging.getLogger(LOGGER)


def load_environment(taskset: str, config: Mapping[str, Any]) -> vf.Env:
    """The taskset's own environment, or verifiers' single-agent one, with our harness unless the taskset brings one.

    config: the taskset's. Raises ConfigError for a name that is none, a config that does not fit, and for what can't
    be trained on here.
    """
    prepare_process()
    module = taskset.rpartition("/")[2].partition("@")[0]  # of the hub's owner/name@version
    if not module.replace("-", "_").isidentifier():
        raise ConfigError(
            f"The verifiers taskset is {shown(taskset)}; it is the name of an installed taskset, or of a top-level "
            "module on the import path, such as my_tasks."
        )
    named = {"id": taskset, **config}
    try:
        seats = agent_config_fields(loaders.resolve_env_config({"taskset": named}))
        if len(seats) == 1:
            seat = {"runtime": {"type": "subprocess"}, "retries": {"max_retries": 0, "rules": []}}
            ((role, declared),) = seats.items()
            if declared.harness is None and loaders.default_harness_id(taskset) == NO_HARNESS:
                seat["harness"] = {"id": HARNESS}
            environment = loaders.load_environment(loaders.resolve_env_config({"taskset": named, role: seat}))
    except ValidationError as failure:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in failure.errors())
        raise ConfigError(
            f"The verifiers taskset {taskset!r} can't be made with {dict(config)!r:.200} ({wrong}); give it what its "
            "config has."
        ) from failure
    except Exception as failure:  # importing runs the taskset's module, which may raise anything
        if isinstance(failure, ModuleNotFoundError) and failure.name is None:  # verifiers' own: there is no such module
            raise ConfigError(
                f"There is no verifiers taskset {taskset!r}: no module {module.replace('-', '_').lower()} is installed "
                "or on the import path."
            ) from failure
        raise ConfigError(
            f"The verifiers taskset {taskset!r} can't be loaded: {failure_text(failure).rstrip('.')}. Its module must "
            "import without errors, and export one Taskset in __all__."
        ) from failure
    if len(seats) != 1:
        raise ConfigError(
            f"The verifiers taskset {taskset!r} has an environment for {len(seats)} agents ({', '.join(seats)}), but "
            "a rollout trains one. Choose a taskset for one agent."
        )
    task_class = type(environment.taskset).task_type()
    _check_tasks(taskset, task_class)
    if task_class.toolsets(environment.config.taskset.task):
        _log.warning(
            "Each rollout of the verifiers taskset %r starts tool servers of its own, each of which takes seconds and "
            "about 200 MB. Schedule.concurrency bounds how many run at once; one that the taskset shares starts once.",
            taskset,
        )
    return environment


def rows_of(environment: vf.Env, num_rows: int | None) -> list[dict[str, Any]]:
    """The first `num_rows` tasks (None: all) as plain values: what differs from their class's defaults."""
    name = environment.config.taskset.id
    if num_rows is not None and (type(num_rows) is not int or num_rows < 1):
        raise ConfigError(f"num_rows of the verifiers taskset {name!r} is {shown(num_rows)}; it counts tasks, from 1.")
    tasks = environment.taskset if num_rows is None else environment.taskset.take(num_rows)
    if not tasks.bounded:
        raise ConfigError(f"The verifiers taskset {name!r} never ends; give num_rows, how many of its tasks to use.")
    try:
        rows = [task.data.model_dump(mode="json", exclude_defaults=True) for task in tasks]
    except Exception as failure:  # the taskset's own code
        raise ConfigError(
            f"The tasks of the verifiers taskset {name!r} can't be loaded: {failure_text(failure)}."
        ) from failure
    if not rows:
        raise ConfigError(f"The verifiers taskset {name!r} has no tasks.")
    return rows


def task_from(environment: vf.Env, row: Mapping[str, Any]) -> vf.Task:
    """The task that a row was made of, as verifiers' own server makes it. Raises pydantic's ValidationError."""
    task_class = type(environment.taskset).task_type()
    return task_class(task_class.data_type().model_validate(row), environment.config.taskset.task)


def prepare_process() -> None:
    """What verifiers looks up in the process: our harness, our runtime, the way to loopback and to users' modules."""
    sys.modules[HARNESS] = verifiers_harness
    runtimes.SubprocessRuntime = TiedRuntime  # what `runtimes.make_runtime` makes of the type "subprocess"
    for name in ("NO_PROXY", "no_proxy"):  # no proxy reaches this machine's own loopback interface
        given = os.environ.get(name, "")
        if LOOPBACK not in given:
            os.environ[name] = ",".join(filter(None, [given, LOOPBACK]))
    # Tool servers are started as `python -m MODULE`, and find what this process finds.
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))


def _check_tasks(taskset: str, task_class: type[vf.Task]) -> None:
    if task_class.NEEDS_CONTAINER:
        raise ConfigError(
            f"The tasks of the verifiers taskset {taskset!r} need a container, which Headway doesn't start. Choose a "
            "taskset whose tasks run without one."
        )
    hidden = [name for name, field in task_class.data_type().model_fields.items() if field.exclude]
    if hidden:
        raise ConfigError(
            f"The tasks of the verifiers taskset {taskset!r} keep {', '.join(hidden)} out of their plain values "
            "(exclude=True), so rows made of them would lack it. Drop exclude=True there."
        )
