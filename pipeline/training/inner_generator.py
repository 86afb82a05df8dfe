"""An async generator within another one, which alone closes it."""

import sys
from collections.abc import AsyncGenerator, Awaitable
from typing import Any


class InnerGenerator:
    """Iterates over `generator`, unknown to the event loop. A loop that ends closes all generators that it knows of at
    once: the outer one could not wait for the end of this one, then, and Python would tell of an error that is none.
    """

    def __init__(self, generator: AsyncGenerator[Any, None]) -> None:
        self._generator = generator
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        try:
            self._first: Awaitable[Any] | None = generator.__anext__()  # here the loop would be told, once (PEP 525)
        finally:
            sys.set_asyncgen_hooks(*hooks)

    def __aiter__(self) -> "InnerGenerator":
        return self

    def __anext__(self) -> Awaitable[Any]:
        first, self._first = self._first, None
        return self._generator.__anext__() if first is None else first

    async def aclose(self) -> None:
        """Raises what it ends with."""
        await self._generator.aclose()
