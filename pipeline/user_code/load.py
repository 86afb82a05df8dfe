"""From import paths to users' environment classes, in the process that runs them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.env import Env, check_env_class
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.failures import failure_text
from pipeline.user_code.named import find_named
from pipeline.wording import shown

MakeEnv = Callable[[], Env]


def load_env_class(path: str) -> type[Env]:
    """The environment class at `module:Class` or `path/to/file.py:Class`. Raises ConfigError in one sentence if it
    can't be had, and ConfigTypeError if it is no environment.
    """
    found = find_named(path, "environment", "my_envs:Search")
    check_env_class(found, path)
    return found


def check_arguments(env_class: type[Env], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments, if the class takes them by these names; ConfigTypeError otherwise. No instance is made."""
    try:
        signature = inspect.signature(env_class)
        signature.bind(**arguments)
    except ValueError:  # of a class written in C, which says nothing of its arguments
        return arguments
    except TypeError as error:
        raise ConfigTypeError(
            f"env_arguments is {shown(arguments)}, but {env_class.__qualname__} takes {signature}: {error}. Correct "
            "the names."
        ) from error
    return arguments


def load_env_makers(
    environment: str | Mapping[str, str], arguments: Mapping[str, Any]
) -> tuple[MakeEnv | dict[str, MakeEnv], str]:
    """(what makes an environment, its class's name for messages) from one path and its keyword arguments; by name,
    for a mix, from paths and arguments by name.
    """
    if isinstance(environment, str):
        env_class = load_env_class(environment)
        return functools.partial(env_class, **check_arguments(env_class, arguments)), env_class.__qualname__
    makers: dict[str, MakeEnv] = {}
    for name, path in environment.items():
        env_class = load_env_class(path)
        makers[name] = functools.partial(env_class, **check_arguments(env_class, arguments.get(name, {})))
    return makers, ", ".join(makers)


def make_first(make_env: MakeEnv | dict[str, MakeEnv], name: str) -> MakeEnv | dict[str, MakeEnv]:
    """`make_env`, tried once: a class that can't be made is told before a model is loaded. What was made is the first
    instance that the returned function gives. Raises ConfigError.
    """
    if isinstance(make_env, Mapping):
        return {part: make_first(make, part) for part, make in make_env.items()}
    try:
        made = [make_env()]
    except KeyboardInterrupt:  # Ctrl-C
        raise
    except BaseException as failure:  # whatever the user's __init__ raises, SystemExit too
        raise ConfigError(
            f"The environment {name} can't be made: {failure_text(failure)}. Its __init__ gets env_arguments by name. "
            "Correct them or the class."
        ) from failure
    return lambda: made.pop() if made else make_env()
