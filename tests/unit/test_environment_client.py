"""Calls to environments: what can't be sent ends the run with its name, what hangs is named with its host."""

import asyncio

import pytest
from open_environments import num_open

from pipeline.errors import RunError, TrajectoryError
from pipeline.processes.environment.environment_client import EnvironmentClient
from pipeline.processes.environment.environment_handle import Dropped
from workers.message_codec import encode
from workers.messages import EnvironmentReplies, EnvironmentReply, Environments


def test_row_that_cannot_be_sent_is_told_with_its_trajectory_and_once():
    errors, sent = [], []

    def send(message):
        encode(message, 0)
        sent.append(message)

    async def test():
        client = EnvironmentClient([send, send], errors.append)
        for group, row in enumerate(({"n": 1}, {"n": 2}, {"n": {1, 2}})):
            client.send(group % 2, group, 0, "reset", {"row": row, "seed": 1})
        await asyncio.sleep(0)
        client.send(0, 4, 0, "drop", {})
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(test())
    (error,) = errors
    assert isinstance(error, RunError) and "reset of trajectory 2.0" in str(error) and "0.0" not in str(error)
    assert all(isinstance(message, Environments) for message in sent)
    assert [call.group for message in sent for call in message.calls] == [1, 4]


def test_overdue_call_is_named_unless_its_host_may_be_at_the_others():
    async def test():
        client = EnvironmentClient([lambda message: None] * 2, lambda error: None)
        client.send(1, 7, 3, "turn", {})
        found = [client.overdue(3600.0), client.overdue(-1.0)]
        now = client._pending[1][2]
        client._pending[1] = (*client._pending[1][:2], now - 25.0, 1)
        for member in range(2):
            client.send(1, 8, member, "turn", {})
        return [*found, client.overdue(10.0), client.overdue(5.0)]

    on_time, words, behind_others, too_long = asyncio.run(test())
    assert on_time is behind_others is None
    assert words.startswith("on_turn or reward of trajectory 7.3 has not come back for 0")
    assert too_long.startswith("on_turn or reward of trajectory 7.3 has not come back for 25")


def test_a_new_environment_goes_to_the_emptiest_host_of_those_that_get_on():
    still = set()

    async def test():
        client = EnvironmentClient([lambda message: None] * 3, lambda error: None, still.__contains__)
        client.open_at[0].add(client.open(1, 0))
        client.open_at[1].update([client.open(2, 0), client.open(2, 1)])
        found = [client.choose()]
        still.add(2)
        found.append(client.choose())
        client.lost(0, "It died.", {})
        found.append(client.choose())
        still.add(1)
        found.append(client.choose())
        client.lost(1, "It died.", {})
        client.lost(2, "It died.", {})
        return [*found, client.choose()]

    assert asyncio.run(test()) == [2, 0, 1, 2, 0]


class PlayedHost:
    """A client with one host, whose calls the test answers by name."""

    def __init__(self):
        self.client = EnvironmentClient([self._send], lambda error: None)
        self.environment = self.client.open(4, 2)
        self.calls = {}

    def _send(self, message):
        self.calls |= {call.call: call for call in message.calls}

    async def ask(self, call):
        """The call's task, once it is with the host."""
        task = asyncio.ensure_future(self.environment.call(call, {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    def answer(self, call, result=None, error=None):
        reply = EnvironmentReply(self.calls[call].request, result or {}, [], 0.0, error)
        self.client.receive(EnvironmentReplies([reply]))

    async def interrupt(self, cause="group_deadline"):
        self.environment.interrupt(cause)
        await asyncio.sleep(0)


def test_an_interrupted_turn_ends_with_its_truncation():
    async def test():
        host = PlayedHost()
        task = await host.ask("turn")
        await host.interrupt()
        assert host.calls["truncate"].argument == {"cause": "group_deadline"}
        host.answer("turn", error="interrupted")
        host.answer("truncate", {"reward": 0.25})
        return (await task).result, num_open(host.client), host.client._pending

    assert asyncio.run(test()) == ({"reward": 0.25}, [0], {})


def test_a_reply_that_is_on_its_way_is_dropped_for_the_truncation():
    async def test():
        host = PlayedHost()
        task = await host.ask("turn")
        await host.interrupt()
        host.answer("turn", {"messages": ["more"], "max_turn_tokens": None})
        host.answer("truncate", {"reward": 0.25})
        return (await task).result, num_open(host.client), host.client._pending

    assert asyncio.run(test()) == ({"reward": 0.25}, [0], {})


def test_a_reward_that_is_on_its_way_goes_before_the_interruption():
    async def test():
        host = PlayedHost()
        task = await host.ask("turn")
        await host.interrupt()
        host.answer("turn", {"messages": None, "reward": 1.0})
        host.answer("truncate", error="came when it had no environment")
        return (await task).result, num_open(host.client), host.client._pending

    assert asyncio.run(test()) == ({"messages": None, "reward": 1.0}, [0], {})


def test_a_turn_that_failed_as_it_was_interrupted_says_both():
    async def test():
        host = PlayedHost()
        task = await host.ask("turn")
        await host.interrupt()
        host.answer("turn", error="on_turn failed")
        host.answer("truncate", error="no environment")
        with pytest.raises(TrajectoryError, match="on_turn failed; no environment"):
            await task
        return num_open(host.client)

    assert asyncio.run(test()) == [0]


@pytest.mark.parametrize("call", ["reset", "truncate"])
def test_only_turns_are_interrupted(call):
    async def test():
        host = PlayedHost()
        task = await host.ask(call)
        await host.interrupt()
        host.answer(call, {"messages": []})
        return (await task).result, list(host.calls)

    assert asyncio.run(test()) == ({"messages": []}, [call])


@pytest.mark.parametrize("call", ["reset", "turn", "truncate"])
def test_dropping_ends_whatever_is_under_way(call):
    async def test():
        host = PlayedHost()
        task = await host.ask(call)
        host.environment.drop()
        with pytest.raises(Dropped):
            await task
        await asyncio.sleep(0)
        host.answer(call, error="interrupted by drop")  # late, and heard by nobody
        host.answer("drop")
        host.environment.drop()  # again: nothing
        await asyncio.sleep(0)
        return list(host.calls), num_open(host.client), host.client._pending

    assert asyncio.run(test()) == ([call, "drop"], [0], {})
