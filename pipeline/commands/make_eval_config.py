"""From the arguments of `headway eval` to an EvalConfig; everything wrong with them is told in one sentence."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.checkpoints import checkpoint_version, is_run_directory
from pipeline.commands.arguments import read_arguments
from pipeline.commands.eval_config import EVAL_EXPOSED, EVAL_LATER, EVAL_OPTIONS, OF_A_RUN, EvalConfig
from pipeline.commands.make_run_config import check_names
from pipeline.commands.option_values import as_written, convert
from pipeline.commands.options import OPTIONS
from pipeline.commands.run_config import task_budget
from pipeline.commands.shared_config import language_of, parse_template_options
from pipeline.commands.workload_config import WorkloadConfig
from pipeline.commands.workload_options import default_task
from pipeline.config import Budget, Sampling, Schedule
from pipeline.errors import ConfigError
from pipeline.model_directory import TINY_NAME, TOOL_FORMATS, find_weights, says_how_it_speaks
from pipeline.run_directory import check_run_dir
from pipeline.tasks import TASKS
from pipeline.trainer_config import EngineConfig
from shm.errors import HeadwayError
from shm.layout import ELEMENT_BYTES
from workers.devices import resolve_devices


def parse_eval(arguments: Sequence[str]) -> EvalConfig:
    """Raises ConfigError with one sentence."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("headway eval needs a model directory or a run: headway eval DIR|RUN_DIR [--OPTION VALUE …].")
    path = arguments[0]
    for flag in (word.partition("=")[0] for word in arguments[1:]):
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in OPTIONS and name not in EVAL_OPTIONS:
            raise ConfigError(f"{flag} has no effect in headway eval, which trains nothing; leave it out.")
    given = read_arguments(arguments[1:], [*EVAL_OPTIONS], EVAL_LATER)
    own = {name: convert(EVAL_OPTIONS[name], item) for name, item in given.items()}
    check_names(own, given, {"task": TASKS})
    checkpoint = find_weights(path, "The model")
    is_run = is_run_directory(path)
    model = str(checkpoint) if says_how_it_speaks(checkpoint) else TINY_NAME
    values = (_of_run(Path(path)) if is_run else {}) | own
    values.setdefault("task", default_task(values | {"model": model}))
    values = task_budget(values["task"], language_of(model)) | values
    if values.get("temperature") == 0.0:
        values.setdefault("eval_group_size", 1)
    try:
        config = _build(values, weights=os.path.abspath(path), model=model, version=checkpoint_version(checkpoint))
    except HeadwayError as error:
        message = str(error).replace("EvalConfig.model", "the model")
        raise ConfigError(as_written(message, given, EVAL_OPTIONS)) from error
    if config.run_dir is not None:
        check_run_dir(config.run_dir, given["run_dir"].where)
    return config


def _build(values: Mapping[str, Any], **found: Any) -> EvalConfig:
    device, samplers = resolve_devices(values.get("device", "auto"), values.get("samplers"))
    parts: dict[type, dict[str, Any]] = {owner: {} for owner, _ in EVAL_EXPOSED}
    for name, value in values.items():
        parts[EVAL_OPTIONS[name].owner][EVAL_OPTIONS[name].field] = value
    engine = EngineConfig(
        schedule=Schedule(**parts[Schedule]),
        budget=Budget(**parts[Budget]),
        seed=values.get("seed", 0),
        **parts[Sampling],
        **parts[EngineConfig],
    )
    language = language_of(found["model"])
    workload = WorkloadConfig(**parts[WorkloadConfig], rows_seed=values.get("seed", 0), language=language)
    evaluation = parts[EvalConfig] | {"device": device, "samplers": samplers} | found
    return EvalConfig(**evaluation, workload=workload, engine=engine)


def _of_run(run_dir: Path) -> dict[str, Any]:
    """The options that the run had, by name, as its config.json tells; a run of the Python API has no task."""
    path = run_dir / "config.json"
    try:
        values = json.loads(path.read_bytes())
        owners = {part["class"]: part for part in _parts(values["config"])}
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; make it readable.") from error
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError(f"{path} is no configuration of a run; name another directory.") from None
    found = {}
    for name in OF_A_RUN:
        option = EVAL_OPTIONS[name]
        owner = {EvalConfig: "RunConfig", Sampling: "EngineConfig"}.get(option.owner, option.owner.__name__)
        if option.field in owners.get(owner, {}):
            found[name] = owners[owner][option.field]
    return found if "RunConfig" in owners else _of_a_python_run(values, path) | found


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
