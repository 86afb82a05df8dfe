"""From the options that a user wrote to a RunConfig.

Everything that can be wrong with them is found here, before any process starts or any file is written, and told in one
sentence that names the option as the user wrote it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.commands.arguments import Given, read_arguments, read_toml
from pipeline.commands.environment_tables import MIX, read_tables
from pipeline.commands.option_values import as_written, convert
from pipeline.commands.options import EXPOSED, LATER_OPTIONS, OPTIONS
from pipeline.commands.run_config import MODES, RunConfig, advantage_named, loss_named
from pipeline.commands.shared_config import language_of
from pipeline.commands.workload_config import EnvironmentTable, WorkloadConfig
from pipeline.commands.workload_options import absolute_sources, default_task, with_holdout, workload_defaults
from pipeline.config import (
    Adam,
    Budget,
    Checkpointing,
    Cosine,
    ForwardBackwardBatch,
    GroupCompletion,
    KVCache,
    Sampling,
    Schedule,
    Truncation,
)
from pipeline.errors import ConfigError
from pipeline.losses import LOSSES, CustomLoss, Loss
from pipeline.models.model_directory import TINY_NAME, find_model, find_weights, says_how_it_speaks
from pipeline.run_dir.run_directory import check_run_dir
from pipeline.tasks import TASKS
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.wording import suggestion
from shm.errors import HeadwayError
from workers.machine.devices import resolve_devices


def parse(arguments: Sequence[str]) -> RunConfig:
    """Arguments of run.py -> RunConfig. Raises ConfigError (or another HeadwayError) with one sentence."""
    flags = [option.name for option in OPTIONS.values() if option.type is bool]
    given = read_arguments(arguments, [*OPTIONS, "config"], LATER_OPTIONS, flags)
    config_file = given.pop("config", None)
    tables: tuple[EnvironmentTable, ...] = ()
    if config_file is not None:
        path = Path(config_file.value)
        told = read_toml(path, [*OPTIONS, MIX], LATER_OPTIONS, tables=[MIX, "env_arguments"])
        if MIX in told:
            tables = read_tables(told.pop(MIX).value, path)
        given = told | given
    values = {name: convert(OPTIONS[name], item) for name, item in given.items()}
    check_names(values, given, {"mode": MODES, "task": TASKS})
    values |= find_directories(values, given)
    # Someone who sets the bound to 0 asks for synchronous training, whatever the mode is called.
    mode = values.get("mode", "sync" if values.get("max_staleness") == 0 else "async")
    values |= absolute_sources(values)
    if tables:
        tables = with_holdout(tables, values.pop("holdout", None))
    else:
        values.setdefault("task", default_task(values))
    defaults = workload_defaults(values) | MODES[mode] | {"mode": mode}
    if mode == "sync" and "admit_ahead" in given:
        raise ConfigError(
            f"{given['admit_ahead'].where} has no effect with the mode sync, which never samples ahead; leave it out."
        )
    _check_evaluation(values, given)
    try:
        config = build(defaults | values, tables)
    except HeadwayError as error:
        raise ConfigError(as_written(str(error), given)) from error
    if config.run_dir is not None:
        check_run_dir(config.run_dir, given["run_dir"].where)
    return config


def check_names(
    values: Mapping[str, Any], given: Mapping[str, Given], choices_by_name: Mapping[str, Iterable[str]]
) -> None:
    """Raise ConfigError for a name that is none of its option's choices, before it would choose defaults."""
    for name, choices in choices_by_name.items():
        if name in values and values[name] not in choices:
            raise ConfigError(
                f"{given[name].where} is {values[name]!r}; it must be one of: {', '.join(choices)}."
                + suggestion(values[name], choices)
            )


def find_directories(values: Mapping[str, Any], given: Mapping[str, Given]) -> dict[str, str]:
    """model and init as absolute paths. With init alone the model comes from there, too, if it is there."""
    found: dict[str, str] = {}
    if values.get("init") is not None:
        weights = find_weights(values["init"], given["init"].where)
        # Not the run's directory: its newest checkpoint may be another one when this run is resumed.
        found["init"] = str(weights)
        if "model" not in values and says_how_it_speaks(weights):
            found["model"] = str(weights)
    if values.get("model", TINY_NAME) != TINY_NAME:
        found["model"] = str(find_model(values["model"], given["model"].where))
    return found


def _check_evaluation(values: Mapping[str, Any], given: Mapping[str, Given]) -> None:
    """Options of evaluations that never take place are refused."""
    every = values.get("eval_every")
    evaluates = every is not None
    needs = {
        "eval_data": evaluates,
        "eval_rows": evaluates,
        "eval_final_group_size": evaluates,
        "eval_group_size": bool(every),
        "keep_best": evaluates,
    }
    for name, has_effect in needs.items():
        if name in given and not has_effect:
            wanted = "--eval-every" if every is None else "an --eval-every above 0"
            raise ConfigError(f"{given[name].where} has no effect without {wanted}; add that, or leave it out.")


def build(values: Mapping[str, Any], tables: tuple[EnvironmentTable, ...] = ()) -> RunConfig:
    """Option values by name, and the environments of a mix -> RunConfig; those left out are the config classes'
    defaults.
    """
    device, samplers = resolve_devices(values.get("device", "auto"), values.get("samplers"))
    parts: dict[type, dict[str, Any]] = {owner: {} for owner, _ in EXPOSED}
    for name, value in values.items():
        parts[OPTIONS[name].owner][OPTIONS[name].field] = value
    sampling = parts[Sampling] | ({"seed": values["seed"]} if "seed" in values else {})
    engine = EngineConfig(
        schedule=Schedule(**parts[Schedule]),
        budget=Budget(**parts[Budget]),
        kv_cache=KVCache(**parts[KVCache]),
        **sampling,
        **parts[EngineConfig],
    )
    overlap, completion = parts[ForwardBackwardBatch], parts[GroupCompletion]
    trainer = TrainerConfig(
        engine=engine,
        optimizer=Adam(**parts[Adam], schedule=Cosine(**parts[Cosine]) if parts[Cosine] else None),
        advantage=advantage_named(values.get("advantage", "group")),
        loss=_loss(values.get("loss", "cispo"), parts),
        completion=GroupCompletion(**({"min_members": min(2, values["group_size"])} | completion)),
        truncation=make_truncation(**parts[Truncation]),
        checkpointing=Checkpointing(**parts[Checkpointing]),
        forward_backward_batch=ForwardBackwardBatch(**overlap) if overlap else "auto",
        **parts[TrainerConfig],
    )
    run = parts[RunConfig] | {"device": device, "samplers": samplers}
    workload = WorkloadConfig(
        **parts[WorkloadConfig],
        environments=tables,
        rows_seed=values.get("seed", 0),
        language=language_of(values.get("model", TINY_NAME)),
    )
    return RunConfig(**run, workload=workload, trainer=trainer)


def make_truncation(by_cause: str = "", **options: Any) -> Truncation:
    """by_cause: `turns=drop,context=reward`."""
    pairs = [pair.partition("=")[::2] for pair in by_cause.split(",") if pair]
    return Truncation(by_cause={cause.strip(): policy.strip() for cause, policy in pairs}, **options)


def _loss(name: str, parts: Mapping[type, dict[str, Any]]) -> Loss:
    """The loss of that name with its options. ConfigError for those that it doesn't take."""
    chosen = loss_named(name)
    own = {f.name for f in fields(chosen)}
    given = {key: value for owner in LOSSES for key, value in parts.get(owner, {}).items()}
    for owner in LOSSES:
        for key in parts.get(owner, {}):
            if key not in own:
                raise ConfigError(f"{owner.__name__}.{key} has no effect with the loss {name!r}; leave it out.")
    if chosen is CustomLoss and "path" not in given:
        raise ConfigError(f"RunConfig.loss is {name!r}, which needs CustomLoss.path, your function as module:function.")
    return chosen(**given)
