"""Tokens of rollouts: valid from start to end, then spent; and harnesses that wait for one, served in order."""

import asyncio

import pytest

from pipeline.endpoint import sessions as sessions_module
from pipeline.endpoint.refusal import Refusal
from pipeline.endpoint.sessions import Sessions, same_token
from tests import virtual_clock


def play(test):
    async def play():
        return await test(Sessions(asyncio.get_running_loop().time))

    return virtual_clock.run(play())


def test_a_token_is_that_of_its_rollout_until_that_has_ended():
    async def test(sessions):
        first, token = sessions.open(None, None)
        second, other = sessions.open(None, None)
        assert token != other and len(token) >= 40
        assert sessions.find(token) is first and sessions.find(other) is second
        sessions.close(first)
        sessions.close(first)
        assert sessions.is_spent(token) and not sessions.is_spent(other) and not sessions.is_spent("unknown")
        with pytest.raises(Refusal, match="spent") as spent:
            sessions.find(token)
        with pytest.raises(Refusal, match="no rollout of this run") as unknown:
            sessions.find(other[:-1])
        assert (spent.value.status, unknown.value.status) == (401, 401)
        assert sessions.find(other) is second
        assert token not in repr(sessions.__dict__), "what is printed of a session holds no token"

    play(test)


def test_rollouts_are_handed_out_once_in_the_order_they_came():
    async def test(sessions):
        opened = [sessions.open(None, {"n": n}) for n in range(3)]
        sessions.open(None, None)  # one that Headway's own call drives
        sessions.close(opened[1][0])
        assert [await sessions.take(1.0) for _ in range(3)] == [opened[0], opened[2], None]
        assert opened[0][0].taken and not opened[1][0].taken

    play(test)


def test_who_waits_gets_the_next_rollout_and_nobody_waits_longer_than_asked():
    async def test(sessions):
        loop = asyncio.get_running_loop()
        waiting = [asyncio.ensure_future(sessions.take(seconds)) for seconds in (5.0, 20.0, 20.0)]
        await asyncio.sleep(10.0)
        assert waiting[0].done() and waiting[0].result() is None and sessions.num_takers == 2
        opened = sessions.open(None, {})
        assert await waiting[1] == opened and loop.time() == 10.0
        assert await waiting[2] is None and loop.time() == 20.0
        assert sessions.num_takers == 0

    play(test)


def test_one_that_goes_away_as_a_rollout_comes_leaves_it_to_the_next():
    async def test(sessions):
        first, second = (asyncio.ensure_future(sessions.take(60.0)) for _ in range(2))
        await asyncio.sleep(1.0)
        opened = sessions.open(None, {})
        first.cancel()  # in the tick in which it was to get it
        assert await second == opened

        third, fourth = (asyncio.ensure_future(sessions.take(60.0)) for _ in range(2))
        await asyncio.sleep(1.0)
        third.cancel()
        await asyncio.sleep(1.0)
        again = sessions.open(None, {})
        assert await fourth == again
        sessions.put_back(*again)
        assert not again[0].taken and await sessions.take(0.0) == again

    play(test)


def test_tokens_are_compared_whole():
    assert same_token("abc", "abc") and not same_token("abd", "abc") and not same_token("ab", "abc")
    assert not same_token("ü", "abc")


def test_a_rollout_that_comes_back_is_the_next_one():
    async def test(sessions):
        sessions.open(None, {"n": 1})
        later, _ = sessions.open(None, {"n": 2})
        first, token = await sessions.take(0.0)
        assert first.taken
        sessions.put_back(first, token)
        assert not first.taken, "it waits for a harness as before"
        assert await sessions.take(0.0) == (first, token)
        assert (await sessions.take(0.0))[0] is later

    play(test)


def test_of_spent_tokens_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_SPENT", 2)

    async def test(sessions):
        opened = [sessions.open(None, None) for _ in range(3)]
        for session, _ in opened:
            sessions.close(session)
        assert [sessions.is_spent(token) for _, token in opened] == [False, True, True]

    play(test)
