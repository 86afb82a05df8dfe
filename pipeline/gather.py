"""Several coroutines at once, none of which is left alone when one fails."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_all(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Their results, in order. The first error (or a cancellation) is raised when the others are cancelled and gone."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException as error:
        for task in tasks:
            task.cancel()
        if not isinstance(error, GeneratorExit):  # a coroutine that is closed must not await anything
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
