"""`headway eval`: what it is told, resolved, as its config.json records it."""

from dataclasses import dataclass
from typing import Any

from pipeline.commands.options import Option, kind_of, option_table, text_of
from pipeline.commands.task_choice import check_eval_rows, check_task
from pipeline.config import Budget, Sampling, Schedule
from pipeline.config_checks import check_choice, check_class, check_integer, check_number, option, required
from pipeline.config_json import config_json
from pipeline.model_directory import TINY_NAME, TOOL_FORMATS
from pipeline.trainer_config import EngineConfig
from shm.layout import ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """One evaluation of weights that are there. `device` and `samplers` are already decided."""

    weights: str  # a run, or a model directory; absolute
    version: int = 0  # of a run's checkpoint
    model: str = TINY_NAME  # the directory that shape and speech come from
    task: str = option("guess", "the built-in task whose held-out rows are rolled out; none: the run's, or calculator")
    template_options: str = option("", "variables of the model's chat template: enable_thinking=false,…")
    tool_format: str = option("auto", "how the model writes tool calls: " + ", ".join(TOOL_FORMATS))
    eval_rows: int | None = option(None, "held-out rows; none: all of the task's")
    eval_group_size: int = option(4, "trajectories per held-out row; at temperature 0 they would be equal: 1")
    seed: int = option(0, "of the sampling noise")
    device: str = required("cpu, cuda, or auto: cuda where there is a GPU")
    samplers: int = required("sampler processes; none: one, or one per GPU beside the first")
    dtype: str = option("float32", "what samplers compute in, or bfloat16")
    kv_gib: float | None = option(
        None, "GiB of each sampler's KV cache; none: for what can run at once, within a share"
    )
    run_dir: str | None = option(None, "where the files go; none: runs/<time>-eval")
    tool_latency: str = option("none", "how long the task's tool takes: none, fixed:MS or lognormal:MEDIAN_MS:SIGMA")
    engine: EngineConfig

    def __post_init__(self) -> None:
        check_choice(self, "dtype", tuple(ELEMENT_BYTES))
        check_integer(self, "eval_rows", minimum=1, unit="held-out rows", optional=True)
        check_integer(self, "eval_group_size", minimum=1, unit="trajectories per held-out row")
        check_integer(self, "seed", minimum=0, maximum=2**63 - 1, unit="random streams")
        check_integer(self, "samplers", minimum=1, unit="sampler processes")
        check_number(self, "kv_gib", above=0.0, optional=True)
        check_class(self, "engine", (EngineConfig,))
        check_task(self)
        check_eval_rows(self)

    def to_json(self) -> dict[str, Any]:
        return config_json(self, seed=self.seed)


EVAL_EXPOSED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        EvalConfig,
        (
            "task",
            "template_options",
            "tool_format",
            "eval_rows",
            "eval_group_size",
            "seed",
            "device",
            "samplers",
            "dtype",
            "kv_gib",
            "run_dir",
            "tool_latency",
        ),
    ),
    (Schedule, ("concurrency", "max_sample_requests")),
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
    (Sampling, ("temperature", "top_p", "top_k")),
    (EngineConfig, ("environment_timeout",)),
)
EVAL_OPTIONS = option_table(EVAL_EXPOSED)
OF_A_RUN = (  # what an evaluation of a run does as the run did, unless told otherwise
    *("task", "template_options", "tool_format", "seed", "dtype", "tool_latency", "environment_timeout"),
    *("temperature", "top_p", "top_k"),
    *(name for owner, names in EVAL_EXPOSED if owner is Budget for name in names),
)
EVAL_LATER = {
    "env": "environments of your own run through the Python API (README.md); headway eval measures built-in tasks",
    "data": "rows of your own go through the Python API (README.md); headway eval measures built-in tasks",
}


def eval_help() -> str:
    """What `headway eval --help` prints."""
    lines = [
        "Usage: headway eval DIR|RUN_DIR [--OPTION VALUE …]",
        "",
        "Measures the model in DIR, or the newest checkpoint of RUN_DIR, on held-out rows, without training. Of a run,",
        "options that are left out are the run's own, but for device, processes and concurrency.",
        "",
    ]
    lines += [
        f"  {one.flag} {kind_of(one)}\n      {one.meaning} (default: {_default(one)})" for one in EVAL_OPTIONS.values()
    ]
    lines += ["", "Later: " + ", ".join("--" + name for name in EVAL_LATER) + "."]
    return "\n".join(lines)


def eval_table() -> str:
    """docs/options.md's second table."""
    rows = ["| option of `headway eval` | value | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{one.flag}` | {kind_of(one)} | {_default(one)} | {one.meaning} |" for one in EVAL_OPTIONS.values()]
    return "\n".join(rows)


def _default(one: Option) -> str:
    return {"device": "auto", "samplers": "none", "task": "none"}.get(one.name) or text_of(one.default)
