"""What RunConfig and EvalConfig choose alike: what is rolled out, a model that speaks its language, and where the
samplers compute.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from pipeline.commands.workload_config import EnvironmentConfig, WorkloadConfig
from pipeline.config_checks import check_choice, check_class, check_integer, check_number, option, required
from pipeline.errors import ConfigError
from pipeline.models.model_directory import TINY_NAME, TOOL_FORMATS
from pipeline.tasks import TASKS
from pipeline.wording import label
from shm.layout import ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig:
    """The fields that both have, and their checks; errors name them as the subclass's own. `device` and `samplers` are
    already decided.
    """

    workload: WorkloadConfig
    model: str = option(TINY_NAME, "the directory of the model; tiny: a small decoder from random weights")
    template_options: str = option("", "variables of the model's chat template: enable_thinking=false,…")
    tool_format: str = option("auto", "how the model writes tool calls: " + ", ".join(TOOL_FORMATS))
    seed: int = option(0, "of the sampling noise")
    device: str = required("cpu, cuda, or auto: cuda where there is a GPU")
    samplers: int = required("sampler processes; none: one, or one per GPU beside the first")
    dtype: str = option("float32", "what samplers compute in, or bfloat16")
    kv_gib: float | None = option(
        None, "GiB of each sampler's KV cache; none: for what can run at once, within a share"
    )
    worker_timeout: float = option(
        60.0, "seconds without a sign of life after which a sampler or the learner is killed and replaced"
    )
    max_restarts: int = option(5, "times that processes of one kind may be replaced within ten minutes")
    run_dir: str | None = option(None, "where the files go; none: runs/<time>")

    def check_shared(self) -> None:
        """Raise ConfigError for a value that can't be, or that does not fit another."""
        check_choice(self, "dtype", tuple(ELEMENT_BYTES))
        check_integer(self, "seed", minimum=0, maximum=2**63 - 1, unit="random streams")
        check_choice(self, "device", ("cpu", "cuda"))
        check_integer(self, "samplers", minimum=1, unit="sampler processes")
        check_number(self, "kv_gib", above=0.0, optional=True)
        check_number(self, "worker_timeout", above=0.0)
        check_integer(self, "max_restarts", minimum=0, unit="replaced processes")
        check_class(self, "workload", (WorkloadConfig,))
        _check_language(self)


def _check_language(config: SharedConfig) -> None:
    """Raise ConfigError unless workload, model, template_options and tool_format fit together."""
    check_choice(config, "tool_format", TOOL_FORMATS)
    options, is_tiny = label(config, "template_options"), config.model == TINY_NAME
    if parse_template_options(config.template_options, options) and is_tiny:
        raise ConfigError(
            f"{options} is {config.template_options!r}, but the model {TINY_NAME} has no chat template; leave it out."
        )
    if config.tool_format != "auto" and is_tiny:
        raise ConfigError(
            f"{label(config, 'tool_format')} is {config.tool_format!r}, but the model {TINY_NAME} writes calls in its "
            "own way; leave it out."
        )
    workload = config.workload
    if is_tiny and (workload.environments or workload.task is None):
        given = "A mix" if workload.environments else label(workload, workload.kind)
        raise ConfigError(
            f"{given} is given, but the model {TINY_NAME} knows the few words of the built-in tasks only; give a model "
            f"directory as {label(config, 'model')} (in Python, a TinyChat gives {TINY_NAME} words of your own: "
            "README.md)."
        )
    for part in workload.environments or (workload,):
        if part.task is not None:
            _check_task(config, part)


def _check_task(config: SharedConfig, part: EnvironmentConfig) -> None:
    """Raise ConfigError unless the model speaks a language of the part's task."""
    task = label(part, "task") if part is config.workload else "The task of an environment"
    speaks = TASKS[part.task].speaks
    if config.model != TINY_NAME and "text" not in speaks:
        raise ConfigError(
            f"{task} is {part.task!r}, which is written in the few words of the model {TINY_NAME}, but "
            f"{label(config, 'model')} is {config.model}; use {_named(tasks_speaking('text'))}, or leave the model out."
        )
    if config.model == TINY_NAME and "tiny" not in speaks:
        raise ConfigError(
            f"{task} is {part.task!r}, which is written in plain text, but the model {TINY_NAME} knows a few words "
            f"only; give a model directory as {label(config, 'model')}, or use {_named(tasks_speaking('tiny'))}."
        )


def check_eval_rows(config: Any) -> None:
    """Raise ConfigError when a built-in task has fewer held-out rows than eval_rows. Rows of one's own are counted when
    they are read.
    """
    task = config.workload.task
    if task is None or config.eval_rows is None:
        return
    available = len(TASKS[task].holdout_rows())
    if config.eval_rows > available:
        raise ConfigError(
            f"{label(config, 'eval_rows')} is {config.eval_rows}, but the task {task!r} has {available} "
            "held-out rows; use at most those."
        )


def parse_template_options(text: str, where: str = "template_options") -> dict[str, Any]:
    """`enable_thinking=false,level=2` -> {"enable_thinking": False, "level": 2}. Raises ConfigError."""
    found: dict[str, Any] = {}
    for pair in text.split(",") if text else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (equals and value and name.isidentifier()) or name in found:
            raise ConfigError(
                f"{where} is {text!r}; write it as NAME=VALUE,NAME=VALUE, each name once, for example "
                "enable_thinking=false."
            )
        found[name] = _template_value(value)
    return found


def _template_value(text: str) -> Any:
    """true, false, none and numbers as such, all else as text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def language_of(model: str) -> str:
    """Which of the tasks' languages a model is spoken to in."""
    return "tiny" if model == TINY_NAME else "text"


def tasks_speaking(language: str) -> list[str]:
    return [name for name, task in TASKS.items() if language in task.speaks]


def _named(tasks: list[str]) -> str:
    return "the task " + " or ".join(tasks) if tasks else "an environment of your own"
