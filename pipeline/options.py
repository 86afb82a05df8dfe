"""The options of run.py: names, types and meanings come from the config dataclasses; values end in a RunConfig.

Everything that can be wrong with them is found here, before any process starts or any file is written, and told in one
sentence that names the option as the user wrote it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pipeline.command_line import Given, read_arguments, read_toml, suggestion
from pipeline.config import (
    Adam,
    Budget,
    Cosine,
    ForwardBackwardBatch,
    GroupCompletion,
    KVCache,
    Sampling,
    Schedule,
    Truncation,
)
from pipeline.errors import ConfigError
from pipeline.losses import CISPO, LOSSES, PPO, CustomLoss, DecoupledPPO, Loss
from pipeline.run_config import COMMON, LOSSES_BY_NAME, MODES, RunConfig, advantage_named, loss_named, task_defaults
from pipeline.run_directory import check_run_dir
from pipeline.tasks import TASKS
from pipeline.trainer_config import EngineConfig, TrainerConfig
from shm.errors import HeadwayError
from workers.devices import resolve_devices

# Names that read better than the field's own, or would be taken twice.
RENAMED = {
    (Adam, "eps"): "adam_eps",
    (Cosine, "warmup"): "lr_warmup",
    (Cosine, "floor"): "lr_floor",
    (GroupCompletion, "mode"): "completion",
    (KVCache, "max_staleness"): "kv_max_staleness",
    (KVCache, "on_limit"): "kv_on_limit",
    (Truncation, "train"): "truncation",
    (Truncation, "by_cause"): "truncation_by_cause",
    (ForwardBackwardBatch, "min_sequences"): "overlap_min_sequences",
    (ForwardBackwardBatch, "min_tokens"): "overlap_min_tokens",
    (CustomLoss, "path"): "loss_function",
}

# Which fields are options, in the order of --help.
EXPOSED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        RunConfig,
        (
            "mode",
            "task",
            "model",
            "steps",
            "seed",
            "device",
            "samplers",
            "dtype",
            "run_dir",
            "tool_latency",
            "advantage",
            "eval_every",
            "eval_rows",
            "eval_group_size",
            "eval_final_group_size",
            "loss",
        ),
    ),
    (
        TrainerConfig,
        (
            "groups_per_step",
            "group_size",
            "max_staleness",
            "stale_policy",
            "batch_order",
            "repeat_dataset",
            "on_failure",
            "zero_variance",
            "allow_trajectory_loss",
            "allow_unbounded_staleness",
            "kl_coefficient",
            "entropy_coefficient",
        ),
    ),
    (ForwardBackwardBatch, ("min_sequences", "min_tokens")),
    (Schedule, ("concurrency", "max_sample_requests", "admit_ahead", "priority", "oversample_factor")),
    (
        Budget,
        (
            "max_turns",
            "max_generated_tokens",
            "max_context_tokens",
            "segment_tokens",
            "max_turn_tokens",
            "final_answer_reserve",
            "tool_output_tokens",
        ),
    ),
    (GroupCompletion, ("mode", "min_members", "on_stragglers", "max_straggler_tokens")),
    (Truncation, ("train", "by_cause")),
    (Sampling, ("temperature", "top_p", "top_k")),
    (Adam, ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")),
    (Cosine, ("warmup", "floor")),
    (CISPO, ("normalize", "eps_max")),
    (PPO, ("clip_low", "clip_high")),  # each option of a loss stands once here, under the first that has it
    (DecoupledPPO, ("max_importance_weight",)),
    (CustomLoss, ("path",)),
    (EngineConfig, ("sampling_policy", "environment_timeout")),
    (KVCache, ("max_staleness", "on_limit", "allow_reprefill")),
)

# Options of features that come later, and what to do until then.
LATER = {
    "env": "environments of your own run through the Python API (README.md); run.py trains --task guess",
    "data": "rows of your own go through the Python API (README.md); run.py trains --task guess",
    "resume": "nothing is saved yet, so a run starts from the beginning",
    "init": "no checkpoint can be loaded yet, so a run starts from random weights",
    "deterministic": "sampling noise depends on the seed alone, but the schedule on the clock",
    "max_minutes": "a run ends after --steps",
}

NUMBER = {int: r"[+-]?\d{1,30}", float: r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"}
FLAGS = {"true": True, "false": False}  # how the command line writes them; a bare --flag is true
MAX_NUMBER = 2.0**63  # so that every whole number fits 64 bits, wherever it goes

# Defaults that are decided when the run starts.
DECIDED_LATE = {"device": "auto", "samplers": None}


@dataclass(frozen=True, slots=True)
class Option:
    """One option; `name` is the key in a TOML file, `--name` with dashes the flag."""

    name: str
    owner: type
    field: str
    type: type  # int, float, bool or str
    optional: bool  # "none" stands for None
    meaning: str
    default: Any  # of the class; MISSING where it comes from recipe or mode

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def default_text(self) -> str:
        """The default as help and docs show it, with mode or task where they differ."""
        if self.owner in LOSSES and self.name not in COMMON:
            return ", ".join(f"{name} {text_of(value)}" for name, value in self._by_loss().items())
        by_mode = {mode: values.get(self.name, self.default) for mode, values in MODES.items()}
        if len(set(by_mode.values())) == 1:
            by_mode = {}
        by_task = {task: defaults[self.name] for task in TASKS if self.name in (defaults := task_defaults(task))}
        if self.name in COMMON:
            by_task = {}
        if by_mode or by_task:
            texts = [f"{key} {text_of(value)}" for key, value in (by_mode | by_task).items()]
            return ", ".join(texts)
        return text_of(COMMON.get(self.name, DECIDED_LATE.get(self.name, self.default)))

    def _by_loss(self) -> dict[str, Any]:
        """The default in each loss that takes it; none where it must be named."""
        found = {name: [f.default for f in fields(cls) if f.name == self.field] for name, cls in LOSSES_BY_NAME.items()}
        return {name: None if of == [MISSING] else of[0] for name, of in found.items() if of}


def _option(owner: type, spec: Field) -> Option:
    kinds = get_args(spec.type) or (spec.type,)
    optional = NoneType in kinds or (spec.name in DECIDED_LATE and DECIDED_LATE[spec.name] is None)
    kind = next(kind for kind in kinds if kind is not NoneType)
    if spec.default_factory is not MISSING:  # a mapping, written as text
        return Option(RENAMED[owner, spec.name], owner, spec.name, str, False, spec.metadata["meaning"], "")
    name = RENAMED.get((owner, spec.name), spec.name)
    return Option(name, owner, spec.name, kind, optional, spec.metadata["meaning"], spec.default)


OPTIONS: dict[str, Option] = {
    option.name: option
    for owner, names in EXPOSED
    for option in (_option(owner, spec) for name in names for spec in fields(owner) if spec.name == name)
}


def parse(arguments: Sequence[str]) -> RunConfig:
    """Arguments of run.py -> RunConfig. Raises ConfigError (or another HeadwayError) with one sentence."""
    flags = [option.name for option in OPTIONS.values() if option.type is bool]
    given = read_arguments(arguments, [*OPTIONS, "config"], LATER, flags)
    config_file = given.pop("config", None)
    if config_file is not None:
        given = read_toml(Path(config_file.value), list(OPTIONS), LATER) | given
    values = {name: convert(OPTIONS[name], item) for name, item in given.items()}
    _check_names(values, given)
    # Someone who sets the bound to 0 asks for synchronous training, whatever the mode is called.
    mode = values.get("mode", "sync" if values.get("max_staleness") == 0 else "async")
    defaults = task_defaults(values.get("task", "guess")) | MODES[mode] | {"mode": mode}
    if mode == "sync" and "admit_ahead" in given:
        raise ConfigError(
            f"{given['admit_ahead'].where} has no effect with the mode sync, which never samples ahead; leave it out."
        )
    _check_evaluation(values, given)
    try:
        config = build(defaults | values)
    except HeadwayError as error:
        raise ConfigError(as_written(str(error), given)) from error
    if config.run_dir is not None:
        check_run_dir(config.run_dir, given["run_dir"].where)
    return config


def _check_evaluation(values: Mapping[str, Any], given: Mapping[str, Given]) -> None:
    """Options of evaluations that never take place are refused."""
    every = values.get("eval_every")
    needs = {"eval_rows": every is not None, "eval_final_group_size": every is not None, "eval_group_size": bool(every)}
    for name, has_effect in needs.items():
        if name in given and not has_effect:
            wanted = "--eval-every" if every is None else "an --eval-every above 0"
            raise ConfigError(f"{given[name].where} has no effect without {wanted}; add that, or leave it out.")


def build(values: Mapping[str, Any]) -> RunConfig:
    """Option values by name -> RunConfig; those left out are the config classes' defaults."""
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
        forward_backward_batch=ForwardBackwardBatch(**overlap) if overlap else "auto",
        **parts[TrainerConfig],
    )
    run = parts[RunConfig] | {"device": device, "samplers": samplers}
    return RunConfig(**run, trainer=trainer)


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


def convert(option: Option, given: Given) -> Any:
    """The text of a command line, or the value of a TOML file, as the option's type. Raises ConfigError."""
    value = given.value
    if option.optional and value == "none":
        return None
    # TOML knows its types; only a whole number may stand for a float there. Texts of the command line are parsed.
    if given.typed:
        fits = type(value) is option.type or (option.type is float and type(value) is int)
    elif option.type is bool:
        fits, value = value in FLAGS, FLAGS.get(value, value)
    else:
        fits = option.type is str or re.fullmatch(NUMBER[option.type], value, flags=re.ASCII)
    if fits and option.type is str:
        fits = "\0" not in value
    elif fits and option.type is not bool:
        number = value if given.typed else option.type(value)
        fits = abs(number) < MAX_NUMBER
        value = option.type(number) if fits else value
    if not fits:
        raise ConfigError(f"{given.where} is {value!r}; it must be {_wanted(option)}.")
    return value


def as_written(message: str, given: Mapping[str, Given]) -> str:
    """An error of a config class or of the devices with the options named as the user wrote them."""
    for option in OPTIONS.values():
        where = given[option.name].where if option.name in given else option.flag
        owner = "RolloutEngine" if option.owner is Sampling else getattr(option.owner, "LABEL", option.owner.__name__)
        owners = {owner, option.owner.__name__}
        if option.owner in LOSSES:  # an option of a loss stands for that of every loss that has it
            owners |= {cls.__name__ for cls in LOSSES}
        for label in (f"{name}.{option.field}" for name in sorted(owners)):
            message = re.sub(rf"\b{re.escape(label)}\b", where, message)
        if option.name in ("device", "samplers"):
            message = re.sub(rf"^{option.name} is\b", f"{where} is", message)
    return message


def help_text() -> str:
    """What --help prints: every option with its default and its meaning."""
    lines = ["Usage: python run.py [--OPTION VALUE …]   (or headway run …)", ""]
    lines.append(
        "  --config FILE.toml\n      the same options from a file of lines name = value; the command line wins"
    )
    for option in OPTIONS.values():
        lines.append(f"  {option.flag} {_kind(option)}\n      {option.meaning} (default: {option.default_text()})")
    lines += ["", "Later: " + ", ".join("--" + name.replace("_", "-") for name in LATER) + "."]
    return "\n".join(lines)


def options_table() -> str:
    """docs/options.md's table."""
    rows = ["| option | value | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{o.flag}` | {_kind(o)} | {o.default_text()} | {o.meaning} |" for o in OPTIONS.values()]
    return "\n".join(rows)


def text_of(value: Any) -> str:
    if value is None or value == "" or isinstance(value, bool):
        return str(value).lower() or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(option: Option) -> str:
    name = {int: "N", float: "X", str: "TEXT", bool: "true or false"}[option.type]
    return f"{name} or none" if option.optional else name


def _wanted(option: Option) -> str:
    name = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[option.type]
    return f"{name}, or none" if option.optional else name


def _check_names(values: Mapping[str, Any], given: Mapping[str, Given]) -> None:
    """Names that options choose from, before they choose defaults; and the model, which is a name or a directory."""
    for name, choices in (("mode", MODES), ("task", TASKS)):
        if name in values and values[name] not in choices:
            raise ConfigError(
                f"{given[name].where} is {values[name]!r}; it must be one of: {', '.join(choices)}."
                + suggestion(values[name], choices)
            )
    model = values.get("model", "tiny")
    if model != "tiny":
        if os.path.isdir(model):
            raise ConfigError(f"{given['model'].where} is a directory; model directories aren't built yet: use tiny.")
        raise ConfigError(f'{given["model"].where} is {model!r}, which is neither "tiny" nor a directory.')
