"""What users' code does to the event loop that it shares, or says of itself in vain: a reply comes all the same."""

import asyncio
import os
import sys

import pytest
from environment_session import Quiz, less_line, reset, session
from open_environments import num_episodes

from pipeline.env import TurnResult, tool
from pipeline.environments.resumed_loop import run_to_end


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Own(BaseException):
    pass


def resumed(env_class, steps):
    """As `session`, on a loop that goes on when users' code ends it."""
    return session(env_class, steps, run=lambda coroutine: run_to_end(asyncio.new_event_loop(), coroutine))


@pytest.mark.parametrize("method", ["reset", "on_turn", "reward"])
def test_a_failure_whose_text_can_not_be_had_is_answered(method):
    def fail(self, *_):
        raise Unprintable

    async def steps(ask, host):
        first = await ask("reset", row={}, seed=1)
        return first if first.error else await ask("turn"), num_episodes(host)

    reply = session(type("Odd", (Quiz,), {method: fail}), steps)
    reply = reply if not isinstance(reply, tuple) else reply[0]
    assert less_line(reply.error, __file__) == f"Odd.{method} of trajectory 4.2 failed with Unprintable"


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt(), Own("x"), GeneratorExit()])
def test_an_exit_in_close_touches_neither_the_reward_nor_the_failure_nor_the_others(failure):
    class Odd(Quiz):
        def on_turn(self, traj):
            if traj.text == "raise":
                raise ValueError("as told")

        def close(self):
            raise failure

    async def steps(ask, host):
        await reset(ask)
        rewarded = await ask("turn", text="yes")
        await reset(ask)
        failed = await ask("turn", text="raise")
        await reset(ask)
        dropped = await ask("drop")
        return rewarded, failed, dropped, (await reset(ask)).error

    rewarded, failed, dropped, again = session(Odd, steps)
    assert (rewarded.error, rewarded.result["reward"]) == (None, 1.0)
    assert less_line(failed.error, __file__) == "Odd.on_turn of trajectory 4.2 failed with ValueError: as told"
    assert dropped.error is None and again is None


@pytest.mark.parametrize("end", [sys.exit, lambda: asyncio.get_running_loop().stop()], ids=["sys.exit", "loop.stop"])
def test_what_ends_the_event_loop_fails_its_own_trajectory_at_most(end):
    """Two tools of one turn are tasks; asyncio hands an exit in a task to whoever runs the loop."""

    class Ending(Quiz):
        @tool
        async def leave(self) -> str:
            end()
            return "still there"

    async def steps(ask, host):
        await reset(ask)
        await ask("reset", member=3, row={}, seed=1)
        left = await ask("turn", calls=[("leave", {}), ("look", {"where": "here"})])
        return left, await ask("turn", member=3, calls=[("look", {"where": "there"})])

    left, other = resumed(Ending, steps)
    assert other.error is None and other.result["messages"][0]["content"] == "nothing there"
    if end is sys.exit:
        where = "Ending.on_turn of trajectory 4.2, in tool leave,"
        assert less_line(left.error, __file__) == f"{where} failed with SystemExit"
    else:
        assert left.result["messages"][0]["content"] == "still there"


def test_an_exit_in_a_task_that_nobody_awaits_harms_nobody():
    class Leaving(Quiz):
        async def on_turn(self, traj):
            async def leave():
                sys.exit(7)

            self.task = asyncio.ensure_future(leave())
            await asyncio.sleep(0.01)
            return TurnResult("go on")

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn")

    assert resumed(Leaving, steps).result["messages"][0]["content"] == "go on"


def test_a_forked_child_of_users_code_never_serves():
    """It has the descriptors of the one that serves, and would take what is meant for that."""

    class Forking(Quiz):
        def on_turn(self, traj):
            self.child = os.fork()
            if not self.child:
                sys.exit(0)
            return TurnResult("go on")

        def close(self):
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1]))

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn")
        await ask("drop")
        return reply

    statuses = []
    assert session(Forking, steps).error is None and statuses == [1]
