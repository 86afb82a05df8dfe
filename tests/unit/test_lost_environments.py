"""Environments whose process is gone: who is told what, who goes on elsewhere with what, who fails."""

import asyncio

import pytest
from open_environments import num_open

from pipeline.errors import TrajectoryError
from pipeline.processes.environment.environment_client import MAX_DEATHS, EnvironmentClient
from pipeline.processes.environment.environment_handle import Dropped, EnvironmentLost
from workers.messages import EnvironmentReplies, EnvironmentReply


class PlayedHosts:
    """A client with two hosts, whose calls the test answers."""

    def __init__(self):
        self.calls = [[], []]  # what each host was asked, in order
        self.client = EnvironmentClient([self._take(0), self._take(1)], lambda error: None)

    def _take(self, host):
        return lambda message: self.calls[host].extend(message.calls)

    async def ask(self, environment, call, **argument):
        """The call's task, once it is with its host."""
        task = asyncio.ensure_future(environment.call(call, argument))
        await settle()
        return task

    async def answer(self, host, result=None, error=None):
        """The last call of that host."""
        reply = EnvironmentReply(self.calls[host][-1].request, result or {}, [], 0.0, error)
        self.client.receive(EnvironmentReplies([reply]))
        await settle()

    async def opened(self, recovery, **result):
        """An environment on host 0, after its reset."""
        environment = self.client.open(4, 2)
        task = await self.ask(environment, "reset", row={"n": 1}, seed=7)
        result = {"messages": ["?"], "tools": [], "wrap_up": [], "recovery": recovery} | result
        await self.answer(0, result)
        await task
        return environment


async def settle():
    for _ in range(6):
        await asyncio.sleep(0)


def play(test):
    return asyncio.run(test(PlayedHosts()))


def test_all_who_wait_are_told_to_start_again_but_for_the_culprit():
    async def test(hosts):
        culprit, other, elsewhere = hosts.client.open(1, 0), hosts.client.open(3, 0), None
        tasks = [await hosts.ask(culprit, "reset"), None, None]
        elsewhere = hosts.client.open(2, 0)
        tasks[2] = await hosts.ask(elsewhere, "reset")
        tasks[1] = await hosts.ask(other, "reset")
        hosts.client.lost(0, "it was killed", {hosts.calls[0][0].request: "reset took too long"})
        with pytest.raises(TrajectoryError, match="reset took too long"):
            await tasks[0]
        with pytest.raises(EnvironmentLost, match="it was killed"):
            await tasks[1]
        assert not tasks[2].done() and num_open(hosts.client) == [0, 1]
        with pytest.raises(EnvironmentLost):  # a handle that nobody has started again
            await other.call("turn", {})
        tasks[2].cancel()

    play(test)


def test_a_trajectory_that_samples_is_told_at_once_and_at_its_next_call():
    async def test(hosts):
        environment = await hosts.opened("drop")
        told = []
        environment.on_lost = lambda: told.append(True)
        hosts.client.lost(0, "it died", {})
        assert told == [True]
        with pytest.raises(EnvironmentLost, match="it died"):
            await environment.call("turn", {})
        environment.drop()  # nobody is there to be told
        await settle()
        assert [call.call for call in hosts.calls[0] + hosts.calls[1]] == ["reset"]

    play(test)


def test_new_environments_go_to_a_host_that_is_there_and_wait_if_none_is():
    async def test(hosts):
        hosts.client.lost(0, "it died", {})
        first = await hosts.ask(hosts.client.open(1, 0), "reset")
        second = await hosts.ask(hosts.client.open(2, 0), "reset")
        assert [len(calls) for calls in hosts.calls] == [0, 2]
        hosts.client.lost(1, "it died, too", {})
        await settle()
        assert isinstance(first.exception(), EnvironmentLost) and isinstance(second.exception(), EnvironmentLost)
        third = await hosts.ask(hosts.client.open(3, 0), "reset")
        assert [len(calls) for calls in hosts.calls] == [0, 2] and not third.done()
        hosts.client.back(0)
        await settle()
        assert [call.group for call in hosts.calls[0]] == [3]
        third.cancel()

    play(test)


@pytest.mark.parametrize("recovery", ["stateless", "snapshot"])
def test_another_host_goes_on_with_all_that_was_said(recovery):
    snapshot = {"snapshot": {"at": 1}} if recovery == "snapshot" else {}

    async def test(hosts):
        restored = []
        environment = await hosts.opened(recovery, **({"snapshot": {"at": 0}} if snapshot else {}))
        environment.on_restored = lambda: restored.append(True)
        environment.on_lost = lambda: pytest.fail("nothing of it is lost")
        first = {"text": "a", "unseen": [{"messages": ["b"]}]}
        task = await hosts.ask(environment, "turn", **first)
        await hosts.answer(0, {"messages": ["c"], "max_turn_tokens": None, "loss_mask_end": 5} | snapshot)
        await task
        task = await hosts.ask(environment, "turn", text="d")
        hosts.client.lost(0, "it died", {})
        await settle()
        assert [call.call for call in hosts.calls[1]] == ["restore"] and restored == []
        assert (
            hosts.calls[1][0].argument
            == {
                "row": {"n": 1},
                "seed": 7,
                "messages": ["?"],
                "turns": [{"turn": first, "messages": ["c"], "rewrites": False}],
                "loss_mask_end": 5,
            }
            | snapshot
        )
        await hosts.answer(1)
        assert [(call.call, call.argument) for call in hosts.calls[1][1:]] == [("turn", {"text": "d"})]
        await hosts.answer(1, {"messages": None, "reward": 1.0})
        assert (await task).result["reward"] == 1.0 and restored == [True]
        assert num_open(hosts.client) == [0, 0] and not hosts.client._pending

    play(test)


def test_a_host_that_dies_while_it_restores_is_followed_by_another():
    async def test(hosts):
        environment = await hosts.opened("stateless")
        hosts.client.lost(0, "it died", {})
        hosts.client.back(0)
        task = await hosts.ask(environment, "turn", text="d")
        at = 0 if len(hosts.calls[0]) > 1 else 1
        hosts.client.lost(at, "it died, too", {})
        await settle()
        await hosts.answer(1 - at)
        await hosts.answer(1 - at, {"messages": None, "reward": 1.0})
        assert (await task).result["reward"] == 1.0
        assert [call.call for call in hosts.calls[1 - at]][-2:] == ["restore", "turn"]

    play(test)


def test_an_environment_that_cannot_be_restored_fails_its_trajectory():
    async def test(hosts):
        environment = await hosts.opened("snapshot", snapshot={})
        hosts.client.lost(0, "it died", {})
        task = await hosts.ask(environment, "turn", text="d")
        await hosts.answer(1, error="restore failed with KeyError: 'at'")
        with pytest.raises(TrajectoryError, match="restore failed with KeyError"):
            await task
        assert num_open(hosts.client) == [0, 0]

    play(test)


@pytest.mark.parametrize("when", ["before the loss", "while it is restored"])
def test_an_interruption_is_not_forgotten_over_a_loss(when):
    """The turn is not acted on any more, and what was truncated knows of it."""

    async def test(hosts):
        environment = await hosts.opened("stateless")
        task = await hosts.ask(environment, "turn", text="d", unseen=[{"messages": ["b"]}])
        if when == "before the loss":
            environment.interrupt("group_deadline")
            await settle()
        hosts.client.lost(0, "it died", {})
        await settle()
        if when == "while it is restored":
            environment.interrupt("group_deadline")
        await hosts.answer(1)
        (_, truncate) = hosts.calls[1]
        assert (truncate.call, truncate.argument) == (
            "truncate",
            {"cause": "group_deadline", "unseen": [{"messages": ["b"]}, {"text": "d"}]},
        )
        await hosts.answer(1, {"reward": 0.25})
        assert (await task).result == {"reward": 0.25}

    play(test)


def test_dropping_ends_a_restoration():
    async def test(hosts):
        environment = await hosts.opened("stateless")
        hosts.client.lost(0, "it died", {})
        task = await hosts.ask(environment, "turn", text="d")
        environment.drop()
        await settle()
        with pytest.raises(Dropped):
            await task
        assert [call.call for call in hosts.calls[1]] == ["restore", "drop"] and num_open(hosts.client) == [0, 0]

    play(test)


def test_a_group_that_is_in_user_code_at_too_many_deaths_fails_and_nobody_else():
    async def test(hosts):
        host, whole = 0, []
        for _ in range(MAX_DEATHS):
            culprit, other = hosts.client.open(1, 0), hosts.client.open(2, 0)
            tasks = [await hosts.ask(culprit, "reset"), await hosts.ask(other, "reset")]
            host = next(host for host in (0, 1) if hosts.calls[host] and hosts.calls[host][-1].group == 1)
            suspect = hosts.calls[host][-1].request
            hosts.client.lost(host, "it died", {}, [suspect])
            hosts.client.lost(1 - host, "it died, too", {}, [])
            hosts.client.back(0)
            hosts.client.back(1)
            whole.append(await asyncio.gather(*tasks, return_exceptions=True))
        return whole

    *before, last = play(test)
    assert all(isinstance(error, EnvironmentLost) for pair in before for error in pair)
    assert isinstance(last[0], TrajectoryError) and isinstance(last[1], EnvironmentLost)
    assert str(last[0]).startswith("reset of trajectory 1.0 was in user code, as its group had been at 2 deaths")


def test_members_of_one_group_that_are_in_user_code_at_one_death_count_once():
    async def test(hosts):
        for _ in range(MAX_DEATHS - 1):
            tasks = [await hosts.ask(hosts.client.open(1, member), "reset") for member in range(2 * MAX_DEATHS)]
            suspects = [call.request for calls in hosts.calls for call in calls]
            hosts.client.lost(0, "it died", {}, suspects)
            hosts.client.lost(1, "its parent died", {})
            hosts.client.back(0)
            hosts.client.back(1)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, EnvironmentLost) for end in ends)

    play(test)


def test_what_was_not_yet_sent_to_a_lost_process_is_not_sent_to_the_next():
    async def test(hosts):
        environment = await hosts.opened("drop")
        task = asyncio.ensure_future(environment.call("turn", {"text": "a"}))
        await asyncio.sleep(0)  # it is asked, and goes out at the end of this tick
        hosts.client.lost(0, "it died", {})
        hosts.client.back(0)
        await settle()
        assert isinstance(task.exception(), EnvironmentLost)
        assert [call.call for call in hosts.calls[0]] == ["reset"]

    play(test)
