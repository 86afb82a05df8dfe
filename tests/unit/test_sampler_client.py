"""Requests to a sampler that is played by the test: order, room, pieces, limit, restart."""

import asyncio

import pytest
from fake_sampler import REPLY_BYTES, FakeSampler, ask, give_up, run, tick

from pipeline.errors import RunError
from pipeline.processes.sampler.sampler_client import RequestLimit, SamplerClient
from shm.queue import QueueProducer
from workers.messages import Generate, Payload, Release


@pytest.fixture
def client():
    return SamplerClient(0, RequestLimit(1000), give_up)


def test_request_and_answer_carry_everything(client):
    async def test():
        sampler = FakeSampler(client)
        future = ask(client, group=4, member=2, context=[9, 8, 7, 6], max_tokens=12, generated=5)
        await tick()
        ((number, request),) = sampler.open.items()
        assert (request.group, request.member, request.version, request.slot) == (4, 2, 5, 1)
        assert (request.max_tokens, request.generated, request.kv_max_age) == (12, 5, 2)
        assert sampler.contexts[number] == [9, 8, 7, 6]
        sampler.answer(number, tokens=(3, 4, 0))
        return await future

    result = run(test())
    assert (result.tokens, result.logprobs) == ([3, 4, 0], [-0.5, -1.0, -1.5])
    assert (result.version, result.kv_version) == (5, 4)
    assert (result.cached, result.stopped, result.seconds, result.queue_seconds) == (3, True, 0.25, 0.5)
    assert (result.evictions, result.dropped) == (1, 2)


def test_what_is_asked_in_one_tick_goes_in_one_message(client):
    async def test():
        sampler = FakeSampler(client)
        for member in range(10):
            ask(client, member=member)
        await tick()
        return sampler

    sampler = run(test())
    assert sampler.messages == [Generate] and len(sampler.open) == 10


def test_oldest_admission_goes_first_then_the_oldest_request():
    client = SamplerClient(0, RequestLimit(1), give_up)

    async def test():
        sampler = FakeSampler(client)
        for priority, group in ((3, 30), (1, 10), (2, 20), (1, 11)):
            ask(client, priority=priority, group=group)
        order = []
        for _ in range(4):
            await tick()
            ((number, request),) = sampler.open.items()
            order.append(request.group)
            sampler.answer(number)
        return order

    assert run(test()) == [10, 11, 20, 30]


def test_waiting_requests_are_counted_without_those_of_evaluations_and_those_taken_back():
    client = SamplerClient(0, RequestLimit(1), give_up)

    async def test():
        FakeSampler(client)
        for group, member in ((1, 0), (1, 1), (2, 0), (-1, 0)):
            ask(client, group=group, member=member)
        await tick()
        before = client.num_waiting
        client.withdraw(2, 0)
        return before, client.num_waiting

    assert run(test()) == (2, 1)


def test_old_evaluation_that_always_asks_again_takes_turns_with_training_over_a_single_request():
    """The worst case: its version is older than all of training, and there is room for one request."""
    client = SamplerClient(0, RequestLimit(1), give_up)

    async def evaluation():
        while True:
            await ask(client, priority=0, group=-1)

    async def test():
        sampler = FakeSampler(client)
        evaluating = asyncio.ensure_future(evaluation())
        await tick()
        training = [ask(client, priority=5, group=group) for group in range(4)]
        order = []
        while not all(future.done() for future in training):
            assert len(order) < 20, "training is starved"
            await tick()
            ((number, request),) = sampler.open.items()
            order.append(request.group)
            sampler.answer(number)
        evaluating.cancel()
        return order

    assert run(test()) == [-1, 0, -1, 1, -1, 2, -1, 3]


def test_who_waits_for_a_request_is_told_where_it_is():
    client = SamplerClient(3, RequestLimit(1), give_up)

    async def test():
        FakeSampler(client)
        for member in range(2):
            ask(client, group=1, member=member)
        await tick()
        told = [client.whereabouts(1, member) for member in range(2)]
        client.disconnect()
        return [*told, client.whereabouts(1, 0)]

    assert run(test()) == [
        "ended by sampler 3, which has it",
        "in line for sampler 3: max_sample_requests and its queue let 1 in for now",
        "sampler 3 is being replaced, and computes it then",
    ]


def test_room_for_the_whole_reply_is_reserved_and_given_back_after_a_shorter_one(client):
    """Replies of up to 400 tokens at 8 bytes: two fit into 8192 bytes, the third waits."""

    async def test():
        sampler = FakeSampler(client)
        for member in range(4):
            ask(client, member=member, max_tokens=400)
        await tick()
        counts = [len(sampler.open)]
        sampler.answer(min(sampler.open), tokens=(1,))
        await tick()
        counts.append(len(sampler.open))
        assert [request.member for request in sampler.open.values()] == [1, 2]
        return counts

    assert run(test()) == [2, 2]


def test_sampler_always_has_room_to_answer(client):
    """Every answer as long as allowed, thousands of them through a ring for a few: `write` never raises."""

    async def test():
        sampler = FakeSampler(client, reply_bytes=8 * 10)
        futures = [ask(client, member=member, max_tokens=1 + member % 7) for member in range(300)]
        while not all(future.done() for future in futures):
            await tick()
            assert sum(request.max_tokens for request in sampler.open.values()) <= 10
            for number, request in list(sampler.open.items()):
                sampler.answer(number, tokens=range(request.max_tokens))
        return [len(future.result().tokens) for future in futures]

    assert run(test()) == [1 + member % 7 for member in range(300)]


def test_contexts_wait_for_room_in_the_ring(client):
    """Contexts of 200 tokens, 800 bytes: five fit into 4096, and more follow when the sampler says what it read."""

    async def test():
        sampler = FakeSampler(client)
        sampler.take, taken = lambda message: None, []
        client.connect(taken.append, QueueProducer(memoryview(bytearray(4096))), client._replies, REPLY_BYTES)
        for member in range(8):
            ask(client, member=member, context=range(200))
        await tick()
        return [len(message.requests) for message in taken]

    assert run(test()) == [5]


def test_large_context_goes_in_pieces_while_the_others_wait_behind_it(client):
    """3000 tokens, 12,000 bytes, through a ring of 4096; with neighbours before and behind."""
    large = [(17 * index) % 1000 for index in range(3000)]

    async def test():
        sampler = FakeSampler(client)
        before = ask(client, priority=0, group=1)
        middle = ask(client, priority=1, group=2, context=large)
        behind = ask(client, priority=2, group=3, context=[4, 5])
        while not behind.done():
            await tick()
            sampler.report()
            for number in list(sampler.open):
                sampler.answer(number)
        assert before.done() and middle.done()
        return sampler

    sampler = run(test())
    assert [sampler.contexts[number] for number in (1, 2, 3)] == [[1, 2, 3], large, [4, 5]]
    kinds = [kind for kind in sampler.messages if kind in (Generate, Payload)]
    assert kinds == [Generate] + [Payload] * 12 + [Generate, Generate]


def test_no_more_requests_are_out_than_allowed_over_all_samplers():
    limit = RequestLimit(3)
    clients = [SamplerClient(index, limit, give_up) for index in range(2)]

    async def test():
        samplers = [FakeSampler(client) for client in clients]
        futures = [ask(client, member=member) for client in clients for member in range(5)]
        served = 0
        while not all(future.done() for future in futures):
            await tick()
            outstanding = [(sampler, number) for sampler in samplers for number in sampler.open]
            assert len(outstanding) == min(3, 10 - served) == limit.outstanding
            sampler, number = outstanding[0]
            sampler.answer(number)
            served += 1
        return limit.outstanding

    assert run(test()) == 0


def test_restart_asks_everything_unanswered_again_exactly_once_oldest_first(client):
    async def test():
        first = FakeSampler(client)
        futures = [ask(client, priority=9 - member, member=member, context=[member]) for member in range(10)]
        await tick()
        for number in (2, 5):
            first.answer(number)
        asked = dict(first.open)
        client.disconnect()
        late = ask(client, priority=0, member=10, context=[10])  # while none is there
        await tick()
        second = FakeSampler(client)
        await tick()
        numbers = list(second.open)
        members = [second.open[number].member for number in numbers]
        contexts = [second.contexts[number] for number in numbers]
        for number in numbers:
            second.answer(number)
        await asyncio.gather(*futures, late)
        return sorted(asked), sorted(numbers), members, contexts, client._limit.outstanding

    asked, numbers, members, contexts, outstanding = run(test())
    assert asked == [1, 3, 4, 6, 7, 8, 9, 10] and numbers == [*asked, 11]
    assert members == [9, 10, 8, 7, 6, 5, 3, 2, 0]  # by priority, then by age
    assert contexts == [[member] for member in members]
    assert outstanding == 0


def test_restart_in_the_middle_of_a_large_context_sends_all_of_it_again(client):
    large = list(range(3000))

    async def test():
        first = FakeSampler(client)
        future = ask(client, context=large)
        await tick()
        assert first.messages.count(Payload) == 4  # the ring is full
        client.disconnect()
        second = FakeSampler(client)
        while not future.done():
            await tick()
            second.report()
            for number in list(second.open):
                second.answer(number)
        return first, second

    first, second = run(test())
    assert first.open == {}
    assert second.contexts == {1: large}


def test_restarted_sampler_is_not_told_of_what_only_its_predecessor_held(client):
    async def test():
        FakeSampler(client)
        client.release(4, 2, bool)
        client.release_version(3)
        client.disconnect()
        client.release(5, 0, bool)
        second = FakeSampler(client)
        client.release(6, 1, bool)
        client.release_version(4)
        await tick()
        return second.released

    assert run(test()) == [([[6, 1]], [4])]


def test_releases_go_before_the_requests_of_the_same_tick(client):
    async def test():
        sampler = FakeSampler(client)
        ask(client)
        client.release(4, 2, bool)
        client.release(4, 3, bool)
        await tick()
        return sampler

    sampler = run(test())
    assert sampler.messages == [Release, Generate]
    assert sampler.released == [([[4, 2], [4, 3]], [])]


def test_failure_reaches_everyone_who_waits_and_frees_the_limit():
    client = SamplerClient(0, RequestLimit(2), give_up)
    error = RunError("It is over.")

    async def test():
        FakeSampler(client)
        futures = [ask(client, member=member) for member in range(4)]
        await tick()
        client.fail(error)
        return await asyncio.gather(*futures, return_exceptions=True), client._limit.outstanding

    assert run(test()) == ([error] * 4, 0)


def test_answer_that_comes_after_the_failure_is_ignored(client):
    """The sampler can't know yet that the run is over."""

    async def test():
        sampler = FakeSampler(client)
        future = ask(client)
        await tick()
        client.fail(RunError("It is over."))
        sampler.answer(1)
        await tick()
        return future.exception()

    assert str(run(test())) == "It is over."


def test_answer_to_a_cancelled_request_is_taken_and_dropped(client):
    async def test():
        sampler = FakeSampler(client)
        futures = [ask(client, member=member) for member in range(2)]
        await tick()
        futures[0].cancel()
        sampler.answer(1)
        sampler.answer(2)
        return (await futures[1]).tokens, client._limit.outstanding

    assert run(test()) == ([7, 8], 0)


def test_only_a_request_that_has_not_left_can_be_withdrawn():
    client = SamplerClient(0, RequestLimit(1), give_up)

    async def test():
        sampler = FakeSampler(client)
        futures = [ask(client, member=member) for member in range(3)]
        await tick()
        for member in (0, 1):  # the first is with the sampler, the others wait behind the limit
            client.withdraw(0, member)
        withdrawn = [future.done() and future.result().tokens for future in futures]
        sampler.answer(1)
        await tick()
        sampler.answer(3)
        return withdrawn, futures[0].result().tokens, (await futures[2]).tokens, client._limit.outstanding

    assert run(test()) == ([False, [], False], [7, 8], [7, 8], 0)
