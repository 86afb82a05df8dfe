"""`headway eval`: what it is told, resolved, as its config.json records it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.commands.options import (
    EXPOSED,
    Option,
    by_name,
    markdown_table,
    option_lines,
    option_table,
    text_of,
)
from pipeline.commands.run_config import in_each_task, task_budget
from pipeline.commands.shared_config import SharedConfig, check_eval_rows
from pipeline.commands.workload_config import WorkloadConfig
from pipeline.config import Budget, Sampling, Schedule
from pipeline.config_checks import check_class, check_integer, option
from pipeline.run_dir.config_json import config_json
from pipeline.trainer_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(SharedConfig):
    """One evaluation of weights that are there. `model` is the directory that shape and speech come from."""

    weights: str  # a run, or a model directory; absolute
    version: int = 0  # of a run's checkpoint
    only_holdout: bool = False  # measures only rows that are held out: of the others, a run has trained on all
    holdout_digests: Mapping[str, str] = field(default_factory=dict)  # of a run's held-out rows, by environment
    eval_rows: int | None = option(None, "held-out rows; none: all")
    eval_group_size: int = option(4, "trajectories per held-out row; at temperature 0 they would be equal: 1")
    run_dir: str | None = option(None, "where the files go; none: runs/<time>-eval")
    engine: EngineConfig

    def __post_init__(self) -> None:
        self.check_shared()
        check_integer(self, "eval_rows", minimum=1, unit="held-out rows", optional=True)
        check_integer(self, "eval_group_size", minimum=1, unit="trajectories per held-out row")
        check_class(self, "engine", (EngineConfig,))
        check_eval_rows(self)

    def to_json(self) -> dict[str, Any]:
        return config_json(self, seed=self.seed)


EVAL_EXPOSED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        WorkloadConfig,
        # Data of an evaluation's own is measured whole, so it needs no second file.
        tuple(name for name in dict(EXPOSED)[WorkloadConfig] if name != "eval_data"),
    ),
    (
        EvalConfig,
        (
            "template_options",
            "tool_format",
            "eval_rows",
            "eval_group_size",
            "seed",
            "device",
            "samplers",
            "dtype",
            "kv_gib",
            "worker_timeout",
            "max_restarts",
            "run_dir",
        ),
    ),
    (Schedule, ("concurrency", "max_sample_requests")),
    (Budget, dict(EXPOSED)[Budget]),
    (Sampling, dict(EXPOSED)[Sampling]),
    (EngineConfig, ("environment_timeout", "environment_processes", "max_retries", "trajectory_timeout")),
)
EVAL_OPTIONS = option_table(EVAL_EXPOSED)
OF_A_RUN = (  # what an evaluation of a run does as the run did, unless told otherwise
    *("template_options", "tool_format", "seed", "dtype", "environment_timeout", "max_retries", "trajectory_timeout"),
    *dict(EXPOSED)[Sampling],
    *dict(EXPOSED)[Budget],
)


def eval_help() -> str:
    """What `headway eval --help` prints."""
    lines = [
        "Usage: headway eval DIR|RUN_DIR [--OPTION VALUE …]",
        "",
        "Measures the model in DIR, or the newest checkpoint of RUN_DIR, on held-out rows, without training. Of a run,",
        "options that are left out are the run's own, but for device, processes and concurrency. Rows given by --data",
        "are measured whole, or the part of them that --holdout names.",
        "",
        "  --config FILE.toml",
        "      options from a file, which may be a run's: what trains is passed over",
    ]
    return "\n".join([*lines, *option_lines(EVAL_OPTIONS, _default)])


def eval_table() -> str:
    """docs/options.md's second table."""
    return markdown_table("option of `headway eval`", EVAL_OPTIONS, _default)


def _default(one: Option) -> str:
    found = {name: budget[one.name] for name, budget in in_each_task(task_budget).items() if one.name in budget}
    if found:
        return by_name(found, one.default)
    return {"device": "auto", "samplers": "none"}.get(one.name) or text_of(one.default)
