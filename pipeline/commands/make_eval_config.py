"""From the arguments of `headway eval` to an EvalConfig; everything wrong with them is told in one sentence."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.checkpoints.saved import checkpoint_version
from pipeline.commands.arguments import Given, read_arguments, read_toml
from pipeline.commands.environment_tables import MIX, read_tables
from pipeline.commands.eval_config import EVAL_EXPOSED, EVAL_OPTIONS, EvalConfig
from pipeline.commands.make_run_config import check_names
from pipeline.commands.option_values import as_written, convert
from pipeline.commands.options import LATER_OPTIONS, OPTIONS
from pipeline.commands.run_record import RunRecord, read_run
from pipeline.commands.shared_config import language_of
from pipeline.commands.workload_config import KINDS, ROWS, EnvironmentTable, WorkloadConfig
from pipeline.commands.workload_options import absolute_sources, default_task, fitting_budget, with_holdout
from pipeline.config import Budget, Sampling, Schedule
from pipeline.errors import ConfigError
from pipeline.models.model_directory import TINY_NAME, find_weights, says_how_it_speaks
from pipeline.run_dir.run_directory import check_run_dir
from pipeline.run_dir.run_files import is_run_directory
from pipeline.tasks import TASKS
from pipeline.trainer_config import EngineConfig
from shm.errors import HeadwayError
from workers.machine.devices import resolve_devices

BUDGETS = dict(EVAL_EXPOSED)[Budget]  # limits fit one task


def parse_eval(arguments: Sequence[str]) -> EvalConfig:
    """Raises ConfigError with one sentence."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("headway eval needs a model directory or a run: headway eval DIR|RUN_DIR [--OPTION VALUE …].")
    path = arguments[0]
    given, tables = _given(arguments[1:])
    own = {name: convert(EVAL_OPTIONS[name], item) for name, item in given.items()}
    check_names(own, given, {"task": TASKS})
    checkpoint = find_weights(path, "The model")
    record = read_run(Path(path)) if is_run_directory(path) else RunRecord()
    model = str(checkpoint) if says_how_it_speaks(checkpoint) else TINY_NAME
    values = record.options | own | absolute_sources(own)
    workload, found = _workload(values, tables, record, given, model)
    if record.workload is not None and record.workload["task"] != workload["task"]:
        values = {name: value for name, value in values.items() if name in own or name not in BUDGETS}
    values = fitting_budget(workload["task"], model) | values
    if values.get("temperature") == 0.0:
        values.setdefault("eval_group_size", 1)
    found |= {"weights": os.path.abspath(path), "model": model, "version": checkpoint_version(checkpoint)}
    try:
        config = _build(values, workload, found)
    except HeadwayError as error:
        message = str(error).replace("EvalConfig.model", "the model")
        raise ConfigError(as_written(message, given, EVAL_OPTIONS)) from error
    if config.run_dir is not None:
        check_run_dir(config.run_dir, given["run_dir"].where)
    return config


def _given(arguments: Sequence[str]) -> tuple[dict[str, Given], tuple[EnvironmentTable, ...]]:
    """The options, and the environments of a mix. Of a --config file, which may be a run's, only what an evaluation
    reads.
    """
    for flag in (word.partition("=")[0] for word in arguments):
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in OPTIONS and name not in EVAL_OPTIONS:
            raise ConfigError(f"{flag} has no effect in headway eval, which trains nothing; leave it out.")
    flags = [option.name for option in EVAL_OPTIONS.values() if option.type is bool]
    given = read_arguments(arguments, [*EVAL_OPTIONS, "config"], {}, flags)
    config_file = given.pop("config", None)
    if config_file is None:
        return given, ()
    path = Path(config_file.value)
    told = read_toml(path, [*OPTIONS, MIX], LATER_OPTIONS, tables=[MIX, "env_arguments"])
    tables = read_tables(told.pop(MIX).value, path) if MIX in told else ()
    return {name: item for name, item in told.items() if name in EVAL_OPTIONS} | given, tables


def _workload(
    values: Mapping[str, Any],
    tables: tuple[EnvironmentTable, ...],
    record: RunRecord,
    given: Mapping[str, Given],
    model: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of WorkloadConfig: those that the user gives, and the run's where they say nothing else; and what of
    EvalConfig follows from where the rows come from.
    """
    names = [spec.name for spec in fields(WorkloadConfig)]
    own = {name: values[name] for name in names if name in given}
    rolls_out = next((name for name in KINDS if own.get(name) is not None), None)
    inherited = dict(record.workload or {})
    if tables or (_says_what(own) and inherited.get("data") is None) or rolls_out == "task":
        inherited = {} if own.get("task") is None or own["task"] != inherited.get("task") else inherited
    elif rolls_out is not None:
        inherited = {name: inherited[name] for name in ROWS}
    if own.get("data") is not None:
        inherited = {name: value for name, value in inherited.items() if name not in ("eval_data", "holdout")}
    of_run = record.workload is not None and own.get("data") is None and bool(inherited)
    if of_run and "holdout" in own:
        raise ConfigError(
            f"{given['holdout'].where} has no effect on a run's own rows, of which those are measured that it has held "
            "out; leave it out, or name rows by --data."
        )
    workload = {"rows_seed": values.get("seed", 0), "task": None} | inherited | own | {"language": language_of(model)}
    if tables:
        workload |= {"environments": with_holdout(tables, workload.pop("holdout", None))}
    elif not inherited and not _says_what(own):
        workload["task"] = default_task(values | {"model": model})
    return workload, {"only_holdout": of_run, "holdout_digests": record.holdout_digests if of_run else {}}


def _says_what(own: Mapping[str, Any]) -> bool:
    """Whether something is given of what is rolled out, or of which rows."""
    return any(own.get(name) is not None for name in (*KINDS, "data"))


def _build(values: Mapping[str, Any], workload: dict[str, Any], found: dict[str, Any]) -> EvalConfig:
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
    evaluation = parts[EvalConfig] | {"device": device, "samplers": samplers} | found
    return EvalConfig(**evaluation, workload=WorkloadConfig(**workload), engine=engine)
