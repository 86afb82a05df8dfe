"""From a WorkloadConfig to what rolls out: an environment, rows to train on, held-out rows, and how tiny speaks.

Data files are read and checked whole here, and users' modules imported once in a process of their own: what is wrong
with them is told before a model is opened.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from pipeline.chat.format import ChatFormat
from pipeline.commands.workload_config import OUTSIDE, EnvironmentConfig, EnvironmentTable, WorkloadConfig
from pipeline.data.load_rows import load_rows
from pipeline.data.mixed_rows import MixedRows, mix_rows
from pipeline.data.split_rows import split_rows, without_holdout
from pipeline.dataset import rows_digest
from pipeline.endpoint.openai_endpoint import AGENT_ENV, OpenAIEndpoint
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.tasks import TASKS
from pipeline.user_code.probe import describe_environment, describe_environments
from pipeline.user_code.source import EnvSource
from pipeline.user_warnings import warn
from pipeline.wording import label

Rows = Sequence[dict[str, Any]]
SINGLE_TURN = "pipeline.single_turn:SingleTurn"
TABLE_KEYS = {"env_arguments": "arguments"}  # where a table has another name for an option
PROMPT_FIELD = "prompt"  # of rows that go with a reward, unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One environment of a workload, with its rows."""

    name: str
    env: str
    arguments: Mapping[str, Any]
    train_rows: Rows
    holdout_rows: Rows  # empty: none are held out
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is rolled out, with all rows in memory and checked; no process runs for it. parts: several are a mix.
    endpoint: makes what agents drive the rollouts through, from its idle_timeout in seconds; None: no agents.
    """

    parts: tuple[Part, ...]
    is_mix: bool
    endpoint: Callable[..., OpenAIEndpoint] | None = None

    @property
    def name(self) -> str:
        """How results call it."""
        return ", ".join(part.name for part in self.parts)

    def engine_arguments(self, timeout: float) -> dict[str, Any]:
        """`env` and `env_arguments` as `RolloutEngine` takes them; timeout: seconds without a sign of an agent."""
        if self.endpoint is not None:
            return {"env": self.endpoint(idle_timeout=timeout)}
        if not self.is_mix:
            return {"env": self.parts[0].env, "env_arguments": dict(self.parts[0].arguments)}
        arguments = {part.name: dict(part.arguments) for part in self.parts}
        return {"env": {part.name: part.env for part in self.parts}, "env_arguments": arguments}

    def train_rows(self) -> Rows | MixedRows:
        """As `AsyncTrainer.run` takes them."""
        if not self.is_mix:
            return self.parts[0].train_rows
        weights = {part.name: part.weight for part in self.parts}
        return mix_rows({part.name: part.train_rows for part in self.parts}, weights=weights)

    def rows_to_measure(self, count: int | None, where: str, *, only_holdout: bool = True) -> list[dict[str, Any]]:
        """The first `count` held-out rows (None: all), of a mix in turn. Without only_holdout: all rows where none are
        held out. Raises ConfigError, naming the option `where`, when there are fewer, but some.
        """
        if only_holdout or any(part.holdout_rows for part in self.parts):
            rows = in_turn([self._marked(part, part.holdout_rows) for part in self.parts])
        else:
            rows = in_turn([self._marked(part, part.train_rows) for part in self.parts])
        if rows and count is not None and count > len(rows):
            raise ConfigError(
                f"{where} is {count}, but {self.name} has {len(rows)} rows to measure; use at most those."
            )
        return rows[:count]

    def rows_line(self) -> str:
        """How many rows there are, of each environment."""
        parts = (
            f"{part.name}: {len(part.train_rows):,} rows to train on, {len(part.holdout_rows):,} held out"
            for part in self.parts
        )
        return "; ".join(parts)

    def describe(self) -> dict[str, Any]:
        """For config.json: what was found, with digests that tell when data has changed."""
        return {
            part.name: {
                "env": part.env,
                "train_rows": len(part.train_rows),
                "train_digest": rows_digest(part.train_rows),
                "holdout_rows": len(part.holdout_rows),
                "holdout_digest": rows_digest(part.holdout_rows),
            }
            for part in self.parts
        }

    def _marked(self, part: Part, rows: Rows) -> Rows:
        return [row | {"environment": part.name} for row in rows] if self.is_mix else rows


def open_workload(config: WorkloadConfig) -> Workload:
    """Raises ConfigError, with options named as fields of the config, for what can't be rolled out."""
    try:
        return _open(config)
    except (ConfigError, ConfigTypeError) as error:
        raise type(error)(_with_labels(str(error), config)) from error


def _with_labels(message: str, config: WorkloadConfig) -> str:
    """The library's words for options become those of `config`, for what stands in a table the table's key."""

    def labelled(found: re.Match) -> str:
        return TABLE_KEYS.get(found[0], found[0]) if config.environments else label(config, found[0])

    return re.sub(r"(?<![\w.'])(env_arguments|holdout|allow_empty_prompts)(?=[\[ ])", labelled, message)


def _open(config: WorkloadConfig) -> Workload:
    endpoint = None
    if config.agent is not None:
        endpoint = partial(OpenAIEndpoint, _agent_of(config), port=config.endpoint_port)
        endpoint()  # raises what it refuses
    tables = {_name_of(table): table for table in config.environments or (config,)}
    files = {name: _read_files(table) for name, table in tables.items()}  # first: that takes the least time
    brought = _brought_rows(tables, config.rows_seed, is_mix=bool(config.environments))
    parts = tuple(
        _open_task(table, name, config.rows_seed, config.language)
        if table.kind == "task"
        else _make_part(table, name, *files[name], brought.get(name))
        for name, table in tables.items()
    )
    return Workload(parts=parts, is_mix=bool(config.environments), endpoint=endpoint)


def tiny_chat(config: WorkloadConfig) -> ChatFormat | None:
    """How the model tiny writes this workload; None: it can't."""
    make = TASKS[config.task].chat_format if config.task is not None else None
    return make() if make is not None else None


def in_turn(rows_of_parts: Sequence[Rows]) -> list[dict[str, Any]]:
    """The first of each, the second of each, …, so that the first few are of every part."""
    return [row for rows in zip_longest(*rows_of_parts) for row in rows if row is not None]


def _read_files(config: EnvironmentConfig) -> tuple[Rows | None, Rows]:
    """Rows to train on (None: no file holds them), and held-out rows of a file of their own."""
    rows = load_rows(config.data, **_fields(config)) if config.data is not None else None
    return rows, load_rows(config.eval_data, **_fields(config)) if config.eval_data is not None else []


def _brought_rows(
    configs: Mapping[str, EnvironmentConfig], seed: int, *, is_mix: bool
) -> dict[str, list[dict[str, Any]] | None]:
    """Of each environment of users' own the rows that it brings, if any and if no data takes their place: all are
    imported and made once, elsewhere.
    """
    found = {name: _environment_of(config) for name, config in configs.items() if config.kind != "task"}
    paths = {name: env for name, (env, _) in found.items() if env is not None}
    arguments = {name: arguments for name, (_, arguments) in found.items()}
    if not paths:
        return {}
    if is_mix:
        with_data = [name for name in paths if configs[name].data is not None]
        described = describe_environments(EnvSource(paths, arguments), seed=seed, without_rows=with_data)
        return {name: one.rows for name, one in described.items()}
    (name,) = paths
    source, with_rows = EnvSource(paths[name], arguments[name]), configs[name].data is None
    return {name: describe_environment(source, seed=seed, with_rows=with_rows).rows}


def _make_part(config: EnvironmentConfig, name: str, rows: Rows | None, held: Rows, brought: Rows | None) -> Part:
    env, arguments = _environment_of(config)
    if rows is None:
        rows = brought
    if rows is None:
        if isinstance(config, EnvironmentTable):
            raise ConfigError(f"The environment {name!r} brings no rows of its own; add data = FILE to its table.")
        raise ConfigError(
            f"{label(config, 'env')} is {env}, which brings no rows of its own; add {label(config, 'data')}, a file."
        )
    if config.holdout is not None:
        try:
            rows, held = split_rows(rows, config.holdout)
        except ConfigError as error:
            raise ConfigError(f"The rows of {name!r}: {error}") from error
    elif held:
        rows = _without(rows, held, config, name)
    return Part(
        name=name,
        env=env or OUTSIDE,
        arguments=arguments,
        train_rows=rows,
        holdout_rows=held,
        weight=getattr(config, "weight", 1.0),
    )


def _without(rows: Rows, held: Rows, config: EnvironmentConfig, name: str) -> Rows:
    """The rows but those that are in the file of held-out rows, too: a run measures only the first of that file."""
    left = without_holdout(rows, held)
    if not left:
        raise ConfigError(
            f"All rows of {name!r} are in {label(config, 'eval_data')}, too, and none is left to train; name another "
            "file."
        )
    if len(left) < len(rows):
        warn(f"{len(rows) - len(left)} of {len(rows)} rows of {name} are held out, too, and are left out of training.")
    return left


def _open_task(config: EnvironmentConfig, name: str, seed: int, language: str) -> Part:
    task = TASKS[config.task]
    latency = {"latency": config.tool_latency} if "latency" in task.options else {}
    return Part(
        name=name,
        env=task.environment,
        arguments=task.arguments_in(language) | latency,
        train_rows=task.train_rows(seed),
        holdout_rows=task.holdout_rows(),
        weight=getattr(config, "weight", 1.0),
    )


def _name_of(config: EnvironmentConfig) -> str:
    """In a mix as the user calls it; else what stands behind the option, of a file without its directories."""
    if isinstance(config, EnvironmentTable):
        return config.called
    return os.path.basename(getattr(config, config.kind))


def _agent_of(config: WorkloadConfig) -> str | None:
    """None: it comes by itself."""
    return None if config.agent == OUTSIDE else config.agent


def _environment_of(config: EnvironmentConfig) -> tuple[str | None, dict[str, Any]]:
    """What an environment process is to import, and its arguments; None: nothing."""
    if config.kind == "env":
        return config.env, dict(config.env_arguments)
    if isinstance(config, WorkloadConfig) and config.kind == "agent":
        agent = _agent_of(config)
        return (None, {}) if agent is None else (AGENT_ENV, {"agent": agent})
    arguments = {"reward": config.reward, "prompt_field": config.prompt_field or PROMPT_FIELD}
    if config.system_prompt is not None:
        arguments["system_prompt"] = config.system_prompt
    if config.allow_empty_prompts:
        arguments["allow_empty_prompts"] = True
    return SINGLE_TURN, arguments


def _fields(config: EnvironmentConfig) -> dict[str, Any]:
    """How `load_rows` reads and checks a file."""
    needs_prompt = config.kind == "reward"
    return {
        "prompt_field": config.prompt_field or (PROMPT_FIELD if needs_prompt else None),
        "answer_field": config.answer_field,
        "id_field": config.id_field,
        "allow_empty_prompts": config.allow_empty_prompts,
    }
