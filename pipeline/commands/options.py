"""The options of run.py, as a table: names, types, defaults and meanings come from the config dataclasses. Help, docs
and `make_run_config.py` read it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType
from typing import Any, get_args

from pipeline.commands.run_config import COMMON, LOSSES_BY_NAME, MODES, OWN, RunConfig, in_each_task, task_defaults
from pipeline.commands.workload_config import EnvironmentTable, WorkloadConfig
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
from pipeline.losses import CISPO, LOSSES, PPO, CustomLoss, DecoupledPPO
from pipeline.run_dir.resume_check import GOALS
from pipeline.tasks import TASKS
from pipeline.trainer_config import EngineConfig, TrainerConfig

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
    (EnvironmentTable, "env_arguments"): "arguments",
}

# Which fields are options, in the order of --help.
EXPOSED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (RunConfig, ("mode",)),
    (
        WorkloadConfig,
        (
            "task",
            "env",
            "env_arguments",
            "data",
            "reward",
            "agent",
            "prompt_field",
            "answer_field",
            "id_field",
            "allow_empty_prompts",
            "system_prompt",
            "holdout",
            "eval_data",
            "endpoint_port",
            "tool_latency",
        ),
    ),
    (
        RunConfig,
        (
            "model",
            "init",
            "template_options",
            "tool_format",
            "steps",
            "max_minutes",
            "seed",
            "device",
            "samplers",
            "dtype",
            "slots",
            "kv_gib",
            "worker_timeout",
            "max_restarts",
            "run_dir",
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
            "shuffle",
            "on_failure",
            "zero_variance",
            "log_trajectories",
            "allow_trajectory_loss",
            "allow_unbounded_staleness",
            "kl_coefficient",
            "entropy_coefficient",
            "stall_timeout",
            "on_stall",
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
    (
        EngineConfig,
        ("sampling_policy", "environment_timeout", "environment_processes", "max_retries", "trajectory_timeout"),
    ),
    (KVCache, ("max_staleness", "on_limit", "allow_reprefill")),
    (Checkpointing, ("weights_every", "rollout_every", "keep", "keep_best")),
)

# Options of features that come later, and what to do until then.
LATER_OPTIONS = {
    "deterministic": "sampling noise depends on the seed alone, but the schedule on the clock",
}

# `--resume RUN_DIR` is no option of a recipe: the run's own one counts, and of it only these may change.
RESUME_MEANING = "go on with that run, by its own recipe; beside it only " + " and ".join(
    "--" + name.replace("_", "-") for name in GOALS
)

NUMBER = int | float

# Defaults that are decided when the run starts.
DECIDED_LATE = {"device": "auto", "samplers": None}


@dataclass(frozen=True, slots=True)
class Option:
    """One option; `name` is the key in a TOML file, `--name` with dashes the flag."""

    name: str
    owner: type
    field: str
    type: Any  # int, float, bool, str, dict (a JSON object) or NUMBER (an int or a float, as it is written)
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
        by_task = defaults_by_task(self.name)
        if self.name in COMMON:
            by_task = {}
        if by_mode:
            by_task = by_mode | by_task
        if by_task:
            return by_name(by_task, MISSING if by_mode else self.default)
        return text_of(COMMON.get(self.name, DECIDED_LATE.get(self.name, self.default)))

    def _by_loss(self) -> dict[str, Any]:
        """The default in each loss that takes it; none where it must be named."""
        found = {name: [f.default for f in fields(cls) if f.name == self.field] for name, cls in LOSSES_BY_NAME.items()}
        return {name: None if of == [MISSING] else of[0] for name, of in found.items() if of}


def defaults_by_task(name: str) -> dict[str, Any]:
    """An option's default in each task, and in what is none (OWN), where these have one of their own."""
    return {task: defaults[name] for task, defaults in in_each_task(task_defaults).items() if name in defaults}


def _option(owner: type, spec: Field) -> Option:
    kinds = get_args(spec.type) or (spec.type,)
    optional = NoneType in kinds or (spec.name in DECIDED_LATE and DECIDED_LATE[spec.name] is None)
    kind = NUMBER if {int, float} <= {*kinds} else next(kind for kind in kinds if kind is not NoneType)
    name = RENAMED.get((owner, spec.name), spec.name)
    if spec.default_factory is not MISSING:  # a mapping: of names to names, written as text, or of names to any values
        kind = dict if get_args(spec.type)[-1] is Any else str
        return Option(name, owner, spec.name, kind, False, spec.metadata["meaning"], "")
    return Option(name, owner, spec.name, kind, optional, spec.metadata["meaning"], spec.default)


def option_table(exposed: Sequence[tuple[type, Sequence[str]]]) -> dict[str, Option]:
    """The fields `exposed` of each class as options by name, in that order."""
    by_name = {owner: {spec.name: spec for spec in fields(owner)} for owner, _ in exposed}
    found = [_option(owner, by_name[owner][name]) for owner, names in exposed for name in names]
    return {option.name: option for option in found}


OPTIONS = option_table(EXPOSED)


def help_text() -> str:
    """What --help prints: every option with its default and its meaning."""
    lines = [
        "Usage: python run.py [--OPTION VALUE …]   (or headway run …)",
        "",
        "  --config FILE.toml\n      the same options from a file of lines name = value; the command line wins\n"
        f"  Defaults may differ by mode and by task; {OWN}: those for env, reward and agent.",
        f"  --resume RUN_DIR\n      {RESUME_MEANING}",
    ]
    return "\n".join([*lines, *option_lines(OPTIONS, Option.default_text), "", later_line(LATER_OPTIONS)])


def option_lines(options: Mapping[str, Option], default_text: Callable[[Option], str]) -> list[str]:
    """What a --help says of each option."""
    return [
        f"  {one.flag} {kind_of(one)}\n      {one.meaning} (default: {default_text(one)})" for one in options.values()
    ]


def later_line(later: Iterable[str]) -> str:
    """What a --help says of options that aren't built yet."""
    return "Later: " + ", ".join("--" + name.replace("_", "-") for name in later) + "."


def options_table() -> str:
    """docs/options.md's table."""
    return markdown_table("option", OPTIONS, Option.default_text)


def markdown_table(title: str, options: Mapping[str, Option], default_text: Callable[[Option], str]) -> str:
    """A table for docs/options.md, one row per option."""
    rows = [f"| {title} | value | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{one.flag}` | {kind_of(one)} | {default_text(one)} | {one.meaning} |" for one in options.values()]
    return "\n".join(rows)


def by_name(defaults: Mapping[str, Any], general: Any) -> str:
    """`8, calculator 4`: those of modes and tasks, behind the general one where a task goes without one of its own."""
    shown = [] if general is MISSING or defaults.keys() >= {*TASKS, OWN} else [text_of(general)]
    return ", ".join(shown + [f"{name} {text_of(value)}" for name, value in defaults.items()])


def text_of(value: Any) -> str:
    """A default in the form in which a user would write it."""
    if value is None or value == "" or isinstance(value, bool):
        return str(value).lower() or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def kind_of(option: Option) -> str:
    """What stands behind the flag."""
    name = {int: "N", float: "X", NUMBER: "N or X", str: "TEXT", bool: "true or false", dict: "JSON"}[option.type]
    return f"{name} or none" if option.optional else name
