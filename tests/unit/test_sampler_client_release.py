"""What a trajectory's end waits for: no lease goes back while a sampler may still compute with the slot."""

import pytest
from fake_sampler import FakeSampler, ask, give_up, run, tick

from pipeline.errors import RunError
from pipeline.processes.sampler.sampler_client import RequestLimit, SamplerClient
from workers.messages import Generate, Release


@pytest.fixture
def client():
    return SamplerClient(0, RequestLimit(1000), give_up)


@pytest.mark.parametrize("end", ["answer", "restart", "failure"])
def test_what_waits_for_a_cancelled_request_waits_until_the_sampler_is_done_with_it(end):
    async def test():
        client = SamplerClient(0, RequestLimit(1), give_up)
        sampler, done = FakeSampler(client), []
        future = ask(client, group=4, member=2)
        waiting = ask(client, group=4, member=3)  # not sent: the limit is one
        await tick()
        future.cancel(), waiting.cancel()
        client.release(4, 3, lambda: done.append(3))
        client.release(4, 2, lambda: done.append(2))
        client.release(9, 9, lambda: done.append(9))
        assert done == [3, 9]
        await tick()
        if end == "answer":
            ((number, _),) = sampler.open.items()
            sampler.answer(number, tokens=())
        elif end == "restart":
            client.disconnect()
        else:
            client.fail(RunError("over"))
        assert done == [3, 9, 2]
        client.disconnect()
        assert done == [3, 9, 2]

    run(test())


def test_request_that_is_cancelled_while_its_pieces_travel_is_released_behind_them(client):
    async def test():
        sampler, done = FakeSampler(client), []
        future = ask(client, group=4, member=2, context=[1] * 3000)  # thrice the queue
        await tick()
        future.cancel()
        client.release(4, 2, lambda: done.append(2))
        for _ in range(100):
            sampler.report()
            await tick()
            if sampler.open:
                break
        assert sampler.messages[-2:] == [Generate, Release] and sampler.released[-1] == ([[4, 2]], [])
        assert not done
        ((number, _),) = sampler.open.items()
        sampler.answer(number, tokens=())
        assert done == [2]

    run(test())
