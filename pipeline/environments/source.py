"""Where a run's environments come from: a class by import path for environment processes, or the class itself for a
thread.
"""

import sys
from typing import Any

from pipeline.config_checks import shown
from pipeline.data.dataset import why_not_plain
from pipeline.env import Env, check_env_class
from pipeline.errors import ConfigError, ConfigTypeError


class EnvSource:
    """An `Env` class or its path `module:Class`, with the keyword arguments to make instances with.

    `path` is None for a class that another process can't import (a script's own `__main__`, a notebook, a function's
    inside): its environments then run in a thread of the supervisor. Raises ConfigError or ConfigTypeError.
    """

    def __init__(self, env: type[Env] | str, arguments: dict[str, Any]) -> None:
        if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
            raise ConfigTypeError(f"env_arguments is {shown(arguments)}; give a dict from names to plain values.")
        why = why_not_plain(arguments)
        if why is not None:
            raise ConfigError(
                f"env_arguments is {arguments!r:.200}; it travels to another process, so it holds plain values only "
                f"(numbers, text, lists, dicts): {why}."
            )
        self.arguments = arguments
        if isinstance(env, str):
            if env.count(":") != 1:
                raise ConfigError(f"env is {env!r}; name it as module:Class, for example my_envs:Search.")
            self.env_class: type[Env] | None = None
            self.path: str | None = env
        else:
            check_env_class(env)
            self.env_class = env
            self.path = _import_path(env)

    def call_timeout(self, timeout: float) -> float:
        """Seconds that one call may take, where the run's `environment_timeout` is `timeout`."""
        return timeout

    def start_config(self, timeout: float, max_tool_chars: int | None) -> dict[str, Any]:
        """What an environment process is told."""
        return {
            "sys_path": [path for path in sys.path if path],
            "environment": self.path,
            "arguments": self.arguments,
            "environment_timeout": timeout,
            "max_tool_chars": max_tool_chars,
        }


def _import_path(env: type[Env]) -> str | None:
    module = sys.modules.get(env.__module__)
    importable = env.__module__ != "__main__" and module is not None and getattr(module, "__spec__", None) is not None
    if not importable or "<locals>" in env.__qualname__:
        return None
    return f"{env.__module__}:{env.__qualname__}"
