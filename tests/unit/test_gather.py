"""Several coroutines at once: results in order, and nobody left alone after a failure or a cancellation."""

import asyncio

import pytest

from pipeline.gather import gather_all


async def after(event, value):
    await event.wait()
    return value


def test_results_come_in_order():
    async def test():
        first, second = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().call_soon(second.set)
        asyncio.get_running_loop().call_soon(first.set)
        return await gather_all(after(first, 1), after(second, 2))

    assert asyncio.run(test()) == [1, 2]


@pytest.mark.parametrize("by_failure", [True, False])
def test_others_have_ended_before_the_error_is_raised(by_failure):
    ended = []

    async def endless(name):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # its own end takes a while
            ended.append(name)

    async def failing():
        await asyncio.sleep(0)
        raise KeyError("one")

    async def test():
        gathering = asyncio.ensure_future(gather_all(endless("a"), *([failing()] if by_failure else []), endless("b")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not by_failure:
            gathering.cancel()
        with pytest.raises(KeyError if by_failure else asyncio.CancelledError):
            await gathering
        return sorted(ended)

    assert asyncio.run(test()) == ["a", "b"]
