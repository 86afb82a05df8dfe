"""Where the supervisor's own coroutines wait, for a report: asyncio's task stacks show only their outermost frame."""

import asyncio
from collections import Counter
from types import CoroutineType
from typing import Any

MAX_LINES = 200


def task_lines() -> list[str]:
    """`count × outermost > … > innermost` of all tasks of the running loop, the most frequent first; equal ones count
    together, since hundreds of trajectories wait in a few places.
    """
    chains = Counter(" > ".join(_frames(task.get_coro())) for task in asyncio.all_tasks())
    return [f"{count} × {chain}" for chain, count in chains.most_common(MAX_LINES)]


def _frames(coroutine: Any) -> list[str]:
    frames = []
    while isinstance(coroutine, CoroutineType):
        frame, code = coroutine.cr_frame, coroutine.cr_code
        line = frame.f_lineno if frame is not None else code.co_firstlineno
        frames.append(f"{coroutine.__qualname__} ({_short(code.co_filename)}:{line})")
        coroutine = coroutine.cr_await
    if coroutine is not None:
        frames.append(type(coroutine).__name__)
    return frames


def _short(path: str) -> str:
    return "/".join(path.rsplit("/", 2)[-2:])
