"""Where a run's environments come from: classes by import path for environment processes, or the classes themselves for
a thread; one for all rows, or several by name.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.dataset import ENVIRONMENT_KEY, why_not_plain
from pipeline.env import Env, check_env_class
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.single_turn import Reward, SingleTurn, check_reward, prompt_of
from pipeline.user_code.importable import import_path_of
from pipeline.user_code.load import MakeEnv, check_arguments, load_env_class
from pipeline.user_code.named import checked_path
from pipeline.wording import quoted, shown, suggestion
from workers.import_path import search_path

EXAMPLE = "my_envs:Search"

# Environments of other packages: `verifiers:my_tasks` is the class, made with the argument taskset="my_tasks". By the
# package: path, argument, an example's name, and the extra that installs it.
ADAPTERS: dict[str, tuple[str, str, str, str]] = {
    "reasoning_gym": ("pipeline.adapters.reasoning_gym:ReasoningGym", "task", "chain_sum", "tasks"),
    "verifiers": ("pipeline.adapters.verifiers:Verifiers", "taskset", "my_tasks", "verifiers"),
}


@dataclass(frozen=True, slots=True)
class EnvPart:
    """One environment: its path (None: no other process can import it), its class, if that was given, its arguments."""

    path: str | None
    env_class: type[Env] | None
    arguments: dict[str, Any]


class EnvSource:
    """What a user gives as `env` and `env_arguments`, checked; nothing is imported here.

    env: an `Env` class; its path `module:Class` or `path/to/file.py:Class`; an environment of another package, such as
    `reasoning_gym:chain_sum`; or a mapping from names to such, a mix, in which each row's "environment" names its own,
    and `arguments` are by name too. If a class can't be imported by another process (a script's own `__main__`, a
    notebook, a function's inside), the environments run in a thread of the supervisor. Raises ConfigError or
    ConfigTypeError.
    """

    def __init__(self, env: type[Env] | str | Mapping[str, type[Env] | str], arguments: dict[str, Any]) -> None:
        self.is_mix = isinstance(env, Mapping)
        _check_names(arguments, "env_arguments")
        if isinstance(env, Mapping):
            _check_names(env, "env")
            if not env:
                raise ConfigError("env is an empty mapping; name at least one environment.")
            for name, part_arguments in arguments.items():
                if name not in env:
                    raise ConfigError(
                        f"env_arguments has {name!r}, but the environments are {quoted(list(env))}; for several "
                        f"environments it holds the arguments of each by name.{suggestion(name, env)}"
                    )
                _check_names(part_arguments, f"env_arguments[{name!r}]")
            self.parts = {name: _part(part, arguments.get(name, {}), f" {name!r}") for name, part in env.items()}
        else:
            self.parts = {"": _part(env, arguments, "")}

    @property
    def runs_in_thread(self) -> bool:
        """Whether some class can't be imported by another process."""
        return any(part.path is None for part in self.parts.values())

    @property
    def runs_in_processes(self) -> bool:
        """Whether there is something to run (an outside harness brings all of it along), and in processes."""
        return bool(self.parts) and not self.runs_in_thread

    def check_rows(self, rows: Sequence[Mapping[str, Any]], what: str = "Row") -> None:
        """Raise ConfigError or ConfigTypeError unless every row of a mix names one of its environments, and every row
        for `SingleTurn` has a prompt.
        """
        single_turns = {name: part.arguments for name, part in self.parts.items() if part.env_class is SingleTurn}
        if not self.is_mix and not single_turns:
            return
        for index, row in enumerate(rows):
            name = self._name_for(row, f"{what} {index}")
            if name in single_turns:
                prompt_of(
                    row,
                    single_turns[name].get("prompt_field", "prompt"),
                    f"{what} {index}",
                    allow_empty=single_turns[name].get("allow_empty_prompts", False),
                )

    def _name_for(self, row: Mapping[str, Any], what: str) -> str:
        if not self.is_mix:
            return ""
        name = row.get(ENVIRONMENT_KEY)
        if isinstance(name, str) and name in self.parts:
            return name
        value = f"{shown(name)} as its" if ENVIRONMENT_KEY in row else "no"
        near = suggestion(name, self.parts) if isinstance(name, str) else ""
        raise ConfigError(
            f"{what} has {value} {ENVIRONMENT_KEY!r}; with several environments it names one of "
            f"{quoted(list(self.parts))}: give it one, as rl.mix_rows does.{near}"
        )

    def call_timeout(self, timeout: float) -> float:
        """Seconds that one call may take, where the run's `environment_timeout` is `timeout`."""
        return timeout

    def silence_timeout(self, timeout: float) -> float:
        """Seconds for which the event loop of users' code may stand still."""
        return timeout

    def start_config(self, timeout: float, max_tool_chars: int | None) -> dict[str, Any]:
        """What an environment process is told."""
        paths = {name: part.path for name, part in self.parts.items()}
        arguments = {name: part.arguments for name, part in self.parts.items()}
        return {
            "sys_path": search_path(),
            "environment": paths if self.is_mix else paths[""],
            "arguments": arguments if self.is_mix else arguments[""],
            "environment_timeout": timeout,
            "max_tool_chars": max_tool_chars,
        }

    def load_makers(self) -> tuple[MakeEnv | dict[str, MakeEnv], str]:
        """For a thread: what makes an environment (by name, for a mix), and its name for messages. Imports what was
        given as a path; raises ConfigError.
        """
        makers: dict[str, MakeEnv] = {}
        for name, part in self.parts.items():
            env_class = load_env_class(part.path) if part.env_class is None else part.env_class
            makers[name] = functools.partial(env_class, **part.arguments)
        if self.is_mix:
            return makers, ", ".join(makers)
        return makers[""], makers[""].func.__qualname__


def single_turn_source(reward: Reward | str, arguments: dict[str, Any]) -> EnvSource:
    """`SingleTurn` with this reward and its other arguments (`prompt_field`, `system_prompt`,
    `allow_empty_prompts`)."""
    _check_names(arguments, "env_arguments")
    if "reward" in arguments:
        raise ConfigError("reward is given, and env_arguments names it again; leave one of them out.")
    return EnvSource(SingleTurn, {"reward": reward} | arguments)


def _check_names(value: Any, what: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        wanted = "a dict from names to plain values" if what != "env" else "a mapping from names to environments"
        raise ConfigTypeError(f"{what} is {shown(value)}; give {wanted}.")


def _part(env: Any, arguments: Mapping[str, Any], which: str) -> EnvPart:
    arguments = dict(arguments)
    if env == import_path_of(SingleTurn):
        env = SingleTurn
    if env is SingleTurn and "reward" in arguments:
        arguments["reward"] = reward = _reward_for_others(arguments["reward"])
        if not isinstance(reward, str):  # it stays here, and so does its environment
            SingleTurn(**check_arguments(SingleTurn, arguments))
            return EnvPart(None, SingleTurn, arguments)
    why = why_not_plain(arguments)
    if why is not None:
        raise ConfigError(
            f"env_arguments{which} is {arguments!r:.200}; it travels to another process, so it holds plain values only "
            f"(numbers, text, lists, dicts): {why}."
        )
    if not isinstance(env, str):
        check_env_class(env)
        return EnvPart(import_path_of(env), env, check_arguments(env, arguments))
    package, _, name = env.partition(":")
    if package in ADAPTERS:
        path, argument, example, extra = ADAPTERS[package]
        if not name:
            raise ConfigError(f"env{which} is {env!r}; it names an environment of {package}, as {package}:{example}.")
        if argument in arguments:
            raise ConfigError(f"env{which} is {env!r}, and env_arguments names {argument!r} again; leave it out there.")
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"env{which} is {env!r}, but the package {package} isn't installed; install the extra: "
                f"pip install -e '.[{extra}]' in the checkout."
            )
        return EnvPart(path, None, {argument: name} | arguments)
    return EnvPart(checked_path(env, "environment", EXAMPLE), None, arguments)


def _reward_for_others(reward: Any) -> Any:
    """The path of a reward function; the function itself if no other process can import it."""
    if isinstance(reward, str):
        return checked_path(reward, "reward", "my_rewards:exact")
    check_reward(reward, shown(reward))
    return import_path_of(reward) or reward
