"""What a run tells of itself in its config.json: the options that an evaluation of it takes over, and its workload.

As much as there is: a run of a Python script, or of another version, has not all of them, and an evaluation may be told
the rest. (`stored_config.py` takes all or nothing, for a resume.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.commands.eval_config import EVAL_OPTIONS, OF_A_RUN, EvalConfig
from pipeline.commands.shared_config import parse_template_options
from pipeline.commands.workload_config import EnvironmentTable, WorkloadConfig
from pipeline.config import Sampling
from pipeline.errors import ConfigError
from pipeline.models.model_directory import TOOL_FORMATS
from pipeline.run_dir.run_directory import read_config
from pipeline.run_dir.run_files import CONFIG
from shm.layout import ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """options: values by name. workload: arguments of WorkloadConfig (None: of the Python API, which has none).
    holdout_digests: of the held-out rows, by environment.
    """

    options: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] | None = None
    holdout_digests: dict[str, str] = field(default_factory=dict)


def read_run(run_dir: Path) -> RunRecord:
    """Raises ConfigError when there is no configuration of a run."""
    path, values = run_dir / CONFIG, read_config(run_dir)
    try:
        owners = {part["class"]: part for part in _parts(values["config"])}
    except (LookupError, TypeError, RecursionError):
        raise ConfigError(f"{path} is no configuration of a run; name another directory.") from None
    found = {}
    for name in OF_A_RUN:
        option = EVAL_OPTIONS[name]
        owner = {EvalConfig: "RunConfig", Sampling: "EngineConfig"}.get(option.owner, option.owner.__name__)
        if option.field in owners.get(owner, {}):
            found[name] = owners[owner][option.field]
    if "RunConfig" not in owners:
        return RunRecord(options=_of_a_python_run(values, path) | found)
    try:
        workload = _workload(owners["WorkloadConfig"])
        digests = {name: part["holdout_digest"] for name, part in values.get("workload", {}).items()}
    except (LookupError, TypeError, AttributeError):
        raise ConfigError(f"{path} is no configuration of a run of this version; name another directory.") from None
    return RunRecord(options=found, workload=workload, holdout_digests=digests)


def _workload(record: Mapping[str, Any]) -> dict[str, Any]:
    tables = tuple(EnvironmentTable(**_fields_of(EnvironmentTable, table)) for table in record["environments"])
    return _fields_of(WorkloadConfig, record) | {"environments": tables}


def _fields_of(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    return {spec.name: record[spec.name] for spec in fields(cls)}


_WORDS = {"True": "true", "False": "false", "None": "none"}


def _of_a_python_run(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a run of the Python API, which has no RunConfig, tells of itself elsewhere in its config.json."""
    found: dict[str, Any] = {"seed": values["seed"]} if type(values.get("seed")) is int else {}
    model = values.get("model")
    if not isinstance(model, dict):
        return found
    if model.get("compute_dtype") in ELEMENT_BYTES:
        found["dtype"] = model["compute_dtype"]
    if model.get("tool_format") in TOOL_FORMATS:
        found["tool_format"] = model["tool_format"]
    options = model.get("template_options")
    if isinstance(options, dict) and options:
        text = ",".join(f"{name}={_WORDS.get(repr(value), value)}" for name, value in options.items())
        try:
            written = parse_template_options(text)
        except ConfigError:
            written = None
        if written != options:
            raise ConfigError(
                f"{path} has template options that a command line can't name; evaluate in Python instead."
            )
        found["template_options"] = text
    return found


def _parts(record: Any) -> list[dict[str, Any]]:
    """A config of config.json and all configs within it."""
    if not isinstance(record, dict):
        return []
    inner = [part for value in record.values() for part in _parts(value)]
    return [record, *inner] if "class" in record else inner
