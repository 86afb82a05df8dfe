"""Calls that take too long, are interrupted, overlap, or come out of order: each is still answered once."""

import asyncio
import threading

import pytest
from environment_session import ROW, Quiz, reset, session
from open_environments import num_episodes

from pipeline.env import TurnResult, tool

FOREVER = 3600.0


class Slow(Quiz):
    @tool
    async def wait(self) -> str:
        await asyncio.sleep(FOREVER)

    @tool
    def block(self) -> str:
        self.release.wait(60)
        return "late"

    @tool
    async def stubborn(self) -> str:
        while not self.release.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                pass
        return "late"


@pytest.mark.parametrize("name", ["wait", "block"])
def test_a_call_past_its_deadline_is_ended_and_named(name):
    Slow.release = threading.Event()

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", calls=[(name, {})])
        Slow.release.set()
        return reply, num_episodes(host)

    reply, num_left = session(Slow, steps, timeout=0.05)
    assert reply.error == (
        f"Slow.on_turn of trajectory 4.2, in tool {name}, took longer than environment_timeout = 0.05 s"
    )
    assert num_left == 0 and len(Slow.closed) == 1


def test_a_call_that_ignores_its_cancellation_is_answered_after_the_grace():
    Slow.release = threading.Event()

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", calls=[("stubborn", {})])
        Slow.release.set()
        return reply, num_episodes(host)

    reply, num_left = session(Slow, steps, timeout=0.05, grace=0.05)
    assert reply.error.endswith("environment_timeout = 0.05 s, and does not end when cancelled")
    assert num_left == 0


def test_a_call_that_ends_itself_after_the_deadline_is_still_past_it():
    """It swallows the cancellation and returns a value; that value is not used."""

    class Late(Quiz):
        async def on_turn(self, traj):
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                return TurnResult("too late")

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn")

    reply = session(Late, steps, timeout=0.05)
    assert reply.result == {"timed_out": True} and "took longer than environment_timeout" in reply.error


@pytest.mark.parametrize(("interrupter", "argument"), [("truncate", {"cause": "group_deadline"}), ("drop", {})])
def test_truncate_and_drop_interrupt_a_waiting_tool(interrupter, argument):
    async def steps(ask, host):
        await reset(ask)
        waiting = asyncio.ensure_future(ask("turn", calls=[("wait", {})]))
        await asyncio.sleep(0)  # the turn is under way
        return await ask(interrupter, **argument), await waiting, num_episodes(host)

    ended, waited, num_left = session(Slow, steps)
    assert ended.error is None and ended.result == ({"reward": 0.0} if interrupter == "truncate" else {})
    assert waited.error == f"Slow.on_turn of trajectory 4.2, in tool wait, was interrupted by {interrupter}"
    assert num_left == 0 and len(Slow.closed) == 1


def test_drop_and_reset_sent_together_open_a_fresh_environment():
    async def steps(ask, host):
        await reset(ask)
        waiting = asyncio.ensure_future(ask("turn", calls=[("wait", {})]))
        await asyncio.sleep(0)
        dropped, fresh = await asyncio.gather(ask("drop"), ask("reset", row=ROW, seed=2))
        await waiting
        return dropped, fresh, await ask("turn", text="yes"), len(Slow.closed)

    dropped, fresh, scored, num_closed = session(Slow, steps)
    assert (dropped.error, fresh.error, scored.result["reward"], num_closed) == (None, None, 1.0, 2)


def test_trajectories_do_not_wait_for_each_other():
    async def steps(ask, host):
        await ask("reset", member=0, row=ROW, seed=1)
        await ask("reset", member=1, row=ROW, seed=1)
        slow = asyncio.ensure_future(ask("turn", member=0, calls=[("wait", {})]))
        await asyncio.sleep(0)
        quick = await ask("turn", member=1, text="yes")
        assert not slow.done()
        await ask("drop", member=0)
        await slow
        return quick

    assert session(Slow, steps).result["reward"] == 1.0


def test_calls_out_of_order_are_answered_with_an_error_and_harm_nothing():
    async def steps(ask, host):
        early = [await ask("turn"), await ask("truncate", cause="turns")]
        await reset(ask)
        twice = await ask("reset", row=ROW, seed=1)
        waiting = asyncio.ensure_future(ask("turn", calls=[("wait", {})]))
        await asyncio.sleep(0)
        overlapping = await ask("turn")
        await ask("drop")
        await waiting
        return [reply.error for reply in (*early, twice, overlapping)]

    assert session(Slow, steps) == [
        "Slow.turn of trajectory 4.2 came without a reset before it",
        "Slow.truncate of trajectory 4.2 came when it had no environment",
        "Slow.reset of trajectory 4.2 came while its environment is open; close it with drop first",
        "Slow.turn of trajectory 4.2 came while its turn is unanswered",
    ]


def test_closing_the_host_closes_what_is_open():
    async def steps(ask, host):
        for member in range(3):
            await ask("reset", member=member, row=ROW, seed=1)
        running = asyncio.ensure_future(ask("turn", member=1, calls=[("wait", {})]))
        await asyncio.sleep(0)
        await host.close()
        return num_episodes(host), len(Slow.closed), (await running).error

    num_left, num_closed, error = session(Slow, steps)
    assert (num_left, num_closed) == (0, 3)
    assert error == "Slow.turn of trajectory 4.1 was cancelled by the end of the run"
