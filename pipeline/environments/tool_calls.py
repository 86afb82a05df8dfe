"""Running one tool call of a turn: what the model gets back as text, and what fails the trajectory instead."""

import functools
import json
import time
import urllib.error
from collections.abc import Callable
from typing import Any

from pipeline.environments.tool_threads import TOOL_THREADS
from pipeline.errors import InfrastructureError
from pipeline.user_code.failures import failure_text, sendable
from pipeline.user_code.tool_schema import ArgumentError
from pipeline.user_code.tools import ToolSpec, find_tool, tools_of
from workers.messages import ToolRecord

# Roots of the time-outs and connection errors of HTTP libraries that derive from neither of the built-in ones.
_FOREIGN_ROOTS = {
    ("httpx", "TransportError"),
    ("requests", "ConnectionError"),
    ("requests", "Timeout"),
    ("aiohttp", "ClientConnectionError"),
    ("urllib3", "TimeoutError"),
    ("urllib3", "NewConnectionError"),
    ("openai", "APIConnectionError"),
    ("anthropic", "APIConnectionError"),
}


def is_infrastructure(failure: BaseException) -> bool:
    """Whether an exception of a tool says that the machinery failed, not the model: it fails the trajectory then."""
    if isinstance(failure, (InfrastructureError, TimeoutError, ConnectionError)):
        return True
    if isinstance(failure, urllib.error.URLError) and not isinstance(failure, urllib.error.HTTPError):
        return True
    return any((kind.__module__.partition(".")[0], kind.__name__) in _FOREIGN_ROOTS for kind in type(failure).__mro__)


def as_text(result: Any, max_chars: int | None) -> str:
    """What a tool returned, as the model reads it: a string as it is, None as nothing, anything else as JSON. One
    character more than `max_chars` is enough to see that it is too long; no more is copied.
    """
    if result is None:
        return ""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return sendable(text if max_chars is None else text[: max_chars + 1])


async def run_tool_call(env: Any, traj: Any, call: Any) -> str:
    """Run one call; return the text for the model and record it in the view.

    Arguments that do not fit, an unknown name and what the tool raises become the text `error: …`. Infrastructure
    errors, time-outs and connection errors pass through, as does what is no `Exception` (`SystemExit`, a cancellation).
    """
    started = time.perf_counter()
    found = find_tool(env, call.name)
    traj.running_tools.append(call.name)  # stays if this raises: then it names the culprit
    error = None
    try:
        text = as_text(await _answer(env, found, call), traj.max_tool_chars)
    except ArgumentError as refused:
        error = sendable(str(refused))
    except Exception as failure:  # a user's tool may raise anything; the model learns what
        if is_infrastructure(failure):
            raise
        error = failure_text(failure)
    traj.running_tools.remove(call.name)
    traj.tool_records.append(ToolRecord(call.name, time.perf_counter() - started, error))
    return text if error is None else f"error: {error}"


async def _answer(env: Any, found: tuple[ToolSpec, Callable] | None, call: Any) -> Any:
    if call.error is not None:
        raise ArgumentError(call.error)
    if found is None:
        raise ArgumentError(f"there is no tool {call.name!r}; the tools: {', '.join(tools_of(env)) or 'none'}")
    spec, function = found
    arguments = spec.arguments(call.arguments)
    if spec.is_async:
        return await function(**arguments)
    return await TOOL_THREADS.run(functools.partial(function, **arguments))
