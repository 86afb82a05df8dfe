"""Every call to a host gets exactly one reply, whatever the user's code does."""

import asyncio
import math
import random
import threading

import pytest

from pipeline.env import Env, TurnResult, tool
from pipeline.environment_host import EnvironmentHost
from pipeline.errors import InfrastructureError
from workers.messages import EnvironmentCall

ROW = {"answer": "yes"}
FOREVER = 3600.0


class Quiz(Env):
    """Plain methods, one async tool; what it does is set by class attributes of the tests' subclasses."""

    closed: list

    @tool
    async def look(self, where: str) -> str:
        return f"nothing {where}"

    def reset(self, row):
        return f"question {self.rng.randrange(1000)}"

    def reward(self, traj, row):
        return float(row["answer"] in traj.text)

    def close(self):
        self.closed.append(self)


def session(env_class, steps, timeout=60.0, grace=60.0):
    """Run `await steps(ask, host)` where ask(call, **argument) is one call for trajectory 4.2; returns its result."""
    env_class.closed = []

    async def run():
        host = EnvironmentHost(env_class, timeout=timeout, name=env_class.__name__, grace=grace)

        async def ask(call, member=2, **argument):
            if call == "turn":
                argument = turn(**argument)
            return await host.handle(EnvironmentCall(7, 4, member, call, argument))

        result = await steps(ask, host)
        await host.close()
        return result

    return asyncio.run(run())


def turn(text="", calls=(), num_tokens=3, stopped=True):
    calls = [{"name": name, "arguments": arguments, "error": None} for name, arguments in calls]
    return {"text": text, "tool_calls": calls, "num_tokens": num_tokens, "stopped": stopped}


async def reset(ask):
    reply = await ask("reset", row=ROW, seed=11)
    assert reply.error is None, reply.error
    return reply


def test_reset_gives_messages_and_tool_schemas():
    async def steps(ask, host):
        return await reset(ask)

    reply = session(Quiz, steps)
    assert reply.request == 7 and reply.seconds > 0
    assert reply.result["messages"] == [{"role": "user", "content": f"question {random.Random(11).randrange(1000)}"}]
    assert [schema["function"]["name"] for schema in reply.result["tools"]] == ["look"]


def test_a_turn_with_a_tool_call_is_answered_and_the_episode_goes_on():
    async def steps(ask, host):
        await reset(ask)
        return await ask("turn", calls=[("look", {"where": "here"})]), host.num_episodes

    reply, num_episodes = session(Quiz, steps)
    assert reply.result == {
        "messages": [{"role": "tool", "name": "look", "content": "nothing here"}],
        "max_turn_tokens": None,
    }
    assert [(record.name, record.error) for record in reply.tools] == [("look", None)]
    assert 0 <= reply.tools[0].seconds <= reply.seconds and num_episodes == 1


def test_the_end_of_the_episode_brings_its_reward_in_the_same_reply_and_closes():
    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", text="yes!")
        return reply, host.num_episodes, len(Quiz.closed)

    reply, num_episodes, num_closed = session(Quiz, steps)
    assert reply.result == {"messages": None, "reward": 1.0} and reply.error is None
    assert (num_episodes, num_closed) == (0, 1)


def test_coroutine_methods_do_the_same():
    class Async(Quiz):
        async def reset(self, row):
            await asyncio.sleep(0)
            return [{"role": "system", "content": "be brief"}, {"role": "user", "content": "?"}]

        async def on_turn(self, traj):
            await asyncio.sleep(0)
            return None if traj.num_turns == 2 else TurnResult("go on", max_turn_tokens=9, metrics={"hints": 1})

        async def reward(self, traj, row):
            await asyncio.sleep(0)
            return len(traj.messages)

        async def close(self):
            await asyncio.sleep(0)
            self.closed.append(self)

    async def steps(ask, host):
        start = await reset(ask)
        return start, await ask("turn", text="a"), await ask("turn", text="b"), len(Async.closed)

    start, first, second, num_closed = session(Async, steps)
    assert [message["role"] for message in start.result["messages"]] == ["system", "user"]
    assert first.result == {
        "messages": [{"role": "user", "content": "go on"}],
        "max_turn_tokens": 9,
        "metrics": {"hints": 1.0},
    }
    # system, user, assistant, user, assistant
    assert second.result == {"messages": None, "reward": 5.0} and num_closed == 1


def test_the_last_result_may_carry_metrics_too():
    class Counting(Quiz):
        def on_turn(self, traj):
            return TurnResult(None, metrics={"turns": traj.num_turns})

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn", text="no")

    assert session(Counting, steps).result == {"messages": None, "reward": 0.0, "metrics": {"turns": 1.0}}


def test_plain_methods_run_on_the_loops_own_thread():
    threads = []

    class Where(Quiz):
        def reset(self, row):
            threads.append(threading.current_thread())
            return ""

        def reward(self, traj, row):
            threads.append(threading.current_thread())
            return 0

    async def steps(ask, host):
        await reset(ask)
        await ask("turn")

    session(Where, steps)
    assert threads == [threading.main_thread()] * 2


def test_the_same_seed_gives_the_same_environment():
    async def steps(ask, host):
        replies = [await ask("reset", member=member, row=ROW, seed=seed) for member, seed in ((0, 5), (1, 5), (2, 6))]
        return [reply.result["messages"] for reply in replies]

    first, second, third = session(Quiz, steps)
    assert first == second != third


def test_truncation_is_scored_by_the_environment_and_by_zero_unless_it_says_more():
    class Scored(Quiz):
        def on_truncated(self, traj, row, cause):
            return -0.5 if cause == "context" else -1

    async def steps(ask, host):
        await reset(ask)
        return await ask("truncate", cause="context"), host.num_episodes

    assert session(Quiz, steps)[0].result == {"reward": 0.0}
    reply, num_episodes = session(Scored, steps)
    assert reply.result == {"reward": -0.5} and num_episodes == 0 and len(Scored.closed) == 1


def test_drop_closes_without_a_reward_and_may_come_twice():
    async def steps(ask, host):
        await reset(ask)
        first, second = await ask("drop"), await ask("drop")
        again = await reset(ask)
        return first, second, again, len(Quiz.closed)

    first, second, again, num_closed = session(Quiz, steps)
    assert (first.result, first.error, second.result, second.error) == ({}, None, {}, None)
    assert again.error is None and num_closed == 1


def raising(method, failure):
    def fail(self, *_):
        raise failure

    return type("Broken", (Quiz,), {method: fail})


@pytest.mark.parametrize(
    ("method", "failure", "sentence"),
    [
        ("__init__", OSError("no disk"), "Broken.__init__ of trajectory 4.2 failed with OSError: no disk"),
        ("reset", KeyError("question"), "Broken.reset of trajectory 4.2 failed with KeyError: 'question'"),
        ("on_turn", TypeError("a\nb"), "Broken.on_turn of trajectory 4.2 failed with TypeError: a b"),
        ("reward", ZeroDivisionError(), "Broken.reward of trajectory 4.2 failed with ZeroDivisionError"),
        ("reward", SystemExit(3), "Broken.reward of trajectory 4.2 failed with SystemExit: 3"),
        ("reward", asyncio.CancelledError(), "Broken.reward of trajectory 4.2 failed with CancelledError"),
    ],
)
def test_whatever_user_code_raises_becomes_one_sentence_and_ends_the_environment(method, failure, sentence):
    env_class = raising(method, failure)

    async def steps(ask, host):
        reply = await ask("reset", row=ROW, seed=1)
        if reply.error is None:
            reply = await ask("turn")
        return reply, host.num_episodes, len(env_class.closed)

    reply, num_episodes, num_closed = session(env_class, steps)
    assert (reply.error, reply.result, reply.tools) == (sentence, {}, [])
    assert num_episodes == 0 and num_closed == (method != "__init__")


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [], 10**400])
def test_a_reward_that_is_no_finite_number_is_an_error(value):
    class Odd(Quiz):
        def reward(self, traj, row):
            return value

        def on_truncated(self, traj, row, cause):
            return value

    async def steps(ask, host):
        await reset(ask)
        scored = await ask("turn")
        await reset(ask)
        return scored, await ask("truncate", cause="turns")

    scored, truncated = session(Odd, steps)
    assert "Odd.reward of trajectory 4.2 failed with ValueError: the reward is" in scored.error
    assert "Odd.on_truncated of trajectory 4.2 failed with ValueError: the reward is" in truncated.error


@pytest.mark.parametrize(
    ("on_turn", "fault"),
    [
        (lambda self, traj: "text", "on_turn gave str; it gives a TurnResult, or None"),
        (lambda self, traj: TurnResult([{"role": "user"}]), "Odd.on_turn gave the message"),
        (lambda self, traj: TurnResult([], metrics={"x": math.nan}), "the metric 'x' is nan"),
    ],
)
def test_an_odd_turn_result_is_an_error(on_turn, fault):
    env_class = type("Odd", (Quiz,), {"on_turn": on_turn})

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn")

    assert fault in session(env_class, steps).error


def test_an_infrastructure_error_of_a_tool_names_the_tool():
    class Remote(Quiz):
        @tool
        async def fetch(self) -> str:
            raise InfrastructureError("service is down")

        @tool
        def dial(self) -> str:
            raise ConnectionRefusedError(111, "refused")

    async def steps(ask, host):
        await reset(ask)
        first = await ask("turn", calls=[("fetch", {})])
        await reset(ask)
        return first, await ask("turn", calls=[("dial", {})])

    first, second = session(Remote, steps)
    where = "Remote.on_turn of trajectory 4.2, in tool {},"
    assert first.error == f"{where.format('fetch')} failed with InfrastructureError: service is down"
    assert second.error == f"{where.format('dial')} failed with ConnectionRefusedError: [Errno 111] refused"


def test_another_tool_error_is_text_for_the_model():
    class Clumsy(Quiz):
        @tool
        async def trip(self) -> str:
            raise RuntimeError("ouch")

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn", calls=[("trip", {})])

    reply = session(Clumsy, steps)
    assert reply.error is None and reply.result["messages"][0]["content"] == "error: RuntimeError: ouch"
    assert reply.tools[0].error == "RuntimeError: ouch"


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
        return reply, host.num_episodes

    reply, num_episodes = session(Slow, steps, timeout=0.05)
    assert reply.error == (
        f"Slow.on_turn of trajectory 4.2, in tool {name}, took longer than environment_timeout = 0.05 s"
    )
    assert num_episodes == 0 and len(Slow.closed) == 1


def test_a_call_that_ignores_its_cancellation_is_answered_after_the_grace():
    Slow.release = threading.Event()

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", calls=[("stubborn", {})])
        Slow.release.set()
        return reply, host.num_episodes

    reply, num_episodes = session(Slow, steps, timeout=0.05, grace=0.05)
    assert reply.error.endswith("environment_timeout = 0.05 s, and does not end when cancelled")
    assert num_episodes == 0


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
    assert reply.result == {} and "took longer than environment_timeout" in reply.error


@pytest.mark.parametrize(("interrupter", "argument"), [("truncate", {"cause": "group_deadline"}), ("drop", {})])
def test_truncate_and_drop_interrupt_a_waiting_tool(interrupter, argument):
    async def steps(ask, host):
        await reset(ask)
        waiting = asyncio.ensure_future(ask("turn", calls=[("wait", {})]))
        await asyncio.sleep(0)  # the turn is under way
        return await ask(interrupter, **argument), await waiting, host.num_episodes

    ended, waited, num_episodes = session(Slow, steps)
    assert ended.error is None and ended.result == ({"reward": 0.0} if interrupter == "truncate" else {})
    assert waited.error == f"Slow.on_turn of trajectory 4.2, in tool wait, was interrupted by {interrupter}"
    assert num_episodes == 0 and len(Slow.closed) == 1


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


def test_a_close_that_fails_does_not_touch_the_reward(caplog):
    env_class = raising("close", RuntimeError("stuck door"))

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn", text="yes")

    assert session(env_class, steps).result["reward"] == 1.0
    assert "Broken.close failed: RuntimeError: stuck door" in caplog.text


def test_closing_the_host_closes_what_is_open():
    async def steps(ask, host):
        for member in range(3):
            await ask("reset", member=member, row=ROW, seed=1)
        running = asyncio.ensure_future(ask("turn", member=1, calls=[("wait", {})]))
        await asyncio.sleep(0)
        await host.close()
        return host.num_episodes, len(Slow.closed), (await running).error

    num_episodes, num_closed, error = session(Slow, steps)
    assert (num_episodes, num_closed) == (0, 3)
    assert error == "Slow.turn of trajectory 4.1 was cancelled by the end of the run"
