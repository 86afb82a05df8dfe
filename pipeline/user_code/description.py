"""What an environment, or a function that gives rows, says of itself, as plain values: in a process that may run users'
code.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgpack

from pipeline.dataset import check_rows
from pipeline.env import Env, check_env_class
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.failures import LOGGER, failure_text
from pipeline.user_code.load import check_arguments
from pipeline.user_code.named import find_named
from pipeline.user_code.tools import tools_of
from shm.errors import HeadwayError
from workers.import_path import failing_line

MAX_ANSWER_BYTES = 2**30  # of all rows together, as messages carry them

_END = object()

_log = logging.getLogger(LOGGER)


def describe(env_class: type[Env], arguments: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """The fields of an `EnvDescription`. seed: of the rows; None: they aren't asked for. Raises ConfigError or
    ConfigTypeError in one sentence, whatever the class's own code raises.
    """
    check_env_class(env_class)
    check_arguments(env_class, arguments)
    name = env_class.__qualname__
    env = _call(functools.partial(env_class, **arguments), f"{name}({_written(arguments)})")
    try:
        tools = sorted(tools_of(env))
    finally:
        _close(env)
    if not isinstance(inspect.getattr_static(env_class, "rows"), classmethod | staticmethod):
        raise ConfigTypeError(
            f"{name}.rows is no classmethod; it gives the rows that the environment brings along, and is asked of the "
            "class. Write @classmethod above it, or name it otherwise."
        )
    rows = None
    if seed is not None:
        rows = _call(functools.partial(env_class.rows, seed, **arguments), f"{name}.rows")
    if rows is not None:
        rows = collect_rows(rows, f"{name}.rows")
    return {"name": name, "tools": tools, "recovery": env_class.recovery, "rows": rows}


def rows_at(path: str) -> list[dict[str, Any]]:
    """The rows that the function at `path` gives."""
    found = find_named(path, "data", "my_data:rows")
    if not callable(found):
        raise ConfigTypeError(f"The data {path} is {type(found).__name__}; name a function that gives the rows.")
    return collect_rows(_call(found, path), path)


def collect_rows(rows: Any, what: str) -> list[dict[str, Any]]:
    """Checked rows from anything that gives them one after another."""
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise ConfigTypeError(f"{what} gave {type(rows).__name__}; it gives a list of rows, each a dict.")
    found: list[dict[str, Any]] = []
    num_bytes = 0
    rows = _call(functools.partial(iter, rows), what)
    while (row := _call(functools.partial(next, rows, _END), what)) is not _END:
        found.append(dict(row) if isinstance(row, Mapping) else row)
        try:
            num_bytes += len(msgpack.packb(found[-1]))
        except (TypeError, ValueError, OverflowError):
            break  # named below
        if num_bytes > MAX_ANSWER_BYTES:
            raise ConfigError(
                f"{what} gave more than {MAX_ANSWER_BYTES >> 20} MiB of rows, as messages carry them, in its first "
                f"{len(found):,}; rows are held in memory, so give fewer or smaller ones."
            )
    if not found:
        raise ConfigError(f"{what} gave no rows; give at least one.")
    check_rows(found, f"Of the rows of {what}, row")
    return found


def _call(function: Callable[[], Any], what: str) -> Any:
    """What users' code gives. It may raise anything, which becomes a sentence."""
    try:
        return function()
    except (ConfigError, ConfigTypeError, KeyboardInterrupt):  # Ctrl-C, where this is the user's own process
        raise
    except HeadwayError as error:
        raise ConfigError(str(error)) from error
    except BaseException as error:
        raise ConfigError(f"{what} failed: {failing_line(error)}{failure_text(error)}. Correct it.") from error


def _close(env: Env) -> None:
    """As at the end of a trajectory: what it raises is only logged."""
    if type(env).close is Env.close:
        return
    try:
        closed = env.close()
        if inspect.isawaitable(closed):
            asyncio.run(_settle(closed))
    except (Exception, SystemExit) as failure:
        _log.warning("%s.close failed: %s", type(env).__qualname__, failure_text(failure), exc_info=failure)


async def _settle(closed: Awaitable[Any]) -> None:
    await closed


def _written(arguments: Mapping[str, Any]) -> str:
    """As in a call."""
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return text if len(text) <= 200 else text[:197] + "..."
