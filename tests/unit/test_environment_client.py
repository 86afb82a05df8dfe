"""Calls to environments: what can't be sent ends the run with its name, what hangs is named with its host."""

import asyncio

from pipeline.environment_client import EnvironmentClient
from pipeline.errors import RunError
from workers.messages import Environments, encode


def test_row_that_cannot_be_sent_is_told_with_its_trajectory_and_once():
    errors, sent = [], []

    def send(message):
        encode(message, 0)
        sent.append(message)

    async def test():
        client = EnvironmentClient([send, send], errors.append)
        hosts = [client.open(group, 0) for group in range(3)]
        for group, row in enumerate(({"n": 1}, {"n": 2}, {"n": {1, 2}})):
            client.send(hosts[group]._host, group, 0, "reset", {"row": row, "seed": 1})
        await asyncio.sleep(0)
        client.send(0, 4, 0, "drop", {})
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(test())
    (error,) = errors
    assert isinstance(error, RunError) and "reset of trajectory 2.0" in str(error) and "0.0" not in str(error)
    assert all(isinstance(message, Environments) for message in sent)
    assert [call.group for message in sent for call in message.calls] == [1, 4]


def test_overdue_call_is_named_with_its_host():
    async def test():
        client = EnvironmentClient([lambda message: None] * 2, lambda error: None)
        client.send(1, 7, 3, "turn", {})
        return client.overdue(3600.0), client.overdue(-1.0)

    on_time, (host, words) = asyncio.run(test())
    assert on_time is None
    assert host == 1 and words.startswith("turn of trajectory 7.3 has not come back for 0")
