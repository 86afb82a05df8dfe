"""The start of a run's processes, which takes seconds, cut short when a stop is asked for meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pipeline.processes.active_run import ActiveRun


class Stopped(Exception):
    """The run was asked to stop, and no update had begun."""


async def unless_stopped(
    opening: Coroutine[Any, Any, ActiveRun],
    stop_asked: asyncio.Event,
    end_run: Callable[[ActiveRun], Awaitable[None]],
) -> ActiveRun:
    """The opened run; Stopped, with nothing left of it, when a stop is asked for first."""
    task = asyncio.ensure_future(opening)
    stop = asyncio.ensure_future(stop_asked.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if not stop_asked.is_set():
            return await task
        raise Stopped
    except BaseException:
        task.cancel()
        (opened,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(opened, ActiveRun):  # both happened at once
            await end_run(opened)
        raise
    finally:
        stop.cancel()
