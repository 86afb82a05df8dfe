"""Every call to a host gets exactly one reply, whatever the user's code does."""

import asyncio
import math
import random
import signal
import threading

import pytest
from environment_session import ROW, Quiz, less_line, reset, session
from open_environments import num_episodes

from pipeline.env import TurnResult, tool
from pipeline.environments.host import CANCEL_SECONDS, CLOSE_SECONDS
from pipeline.errors import InfrastructureError
from pipeline.processes.worker.worker_handle import USER_CODE_END_SECONDS
from workers.message_codec import encode
from workers.messages import EnvironmentReplies


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
        return await ask("turn", calls=[("look", {"where": "here"})]), num_episodes(host)

    reply, num_left = session(Quiz, steps)
    assert reply.result == {
        "messages": [{"role": "tool", "name": "look", "content": "nothing here"}],
        "max_turn_tokens": None,
    }
    assert [(record.name, record.error) for record in reply.tools] == [("look", None)]
    assert 0 <= reply.tools[0].seconds <= reply.seconds and num_left == 1


def test_the_end_of_the_episode_brings_its_reward_in_the_same_reply_and_closes():
    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", text="yes!")
        return reply, num_episodes(host), len(Quiz.closed)

    reply, num_left, num_closed = session(Quiz, steps)
    assert reply.result == {"messages": None, "reward": 1.0} and reply.error is None
    assert (num_left, num_closed) == (0, 1)


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
            return TurnResult(done=True, metrics={"turns": traj.num_turns})

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
        return await ask("truncate", cause="context"), num_episodes(host)

    assert session(Quiz, steps)[0].result == {"reward": 0.0}
    reply, num_left = session(Scored, steps)
    assert reply.result == {"reward": -0.5} and num_left == 0 and len(Scored.closed) == 1


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
        return reply, num_episodes(host), len(env_class.closed)

    reply, num_left, num_closed = session(env_class, steps)
    assert (less_line(reply.error, __file__), reply.result, reply.tools) == (sentence, {}, [])
    assert num_left == 0 and num_closed == (method != "__init__")


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, None, "1.0", [], 10**400, [10**5000], pytest.param(10**5000, id="long"), 1e200]
)
def test_a_reward_that_is_no_number_to_reckon_with_is_an_error(value):
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
        (lambda self, traj: TurnResult([], max_turn_tokens=10**40), "TurnResult.max_turn_tokens is 10000"),
        (lambda self, traj: TurnResult([{"role": "user", "content": "a", "at": {1}}]), "which can't be sent (can not"),
        (lambda self, traj: TurnResult([{"role": "user", "content": "a", "at": {(1, 2): 3}}]), "(a tuple can"),
        (lambda self, traj: TurnResult("\ud800"), "which can't be sent ('utf-8' codec"),
        (lambda self, traj: traj.rewrite([{"role": "user", "content": "a", 10**40: 1}]), "traj.rewrite gave the mess"),
        (lambda self, traj: setattr(traj, "loss_mask_end", 10**40), "traj.loss_mask_end is 10000"),
    ],
)
def test_an_odd_turn_result_is_an_error(on_turn, fault):
    env_class = type("Odd", (Quiz,), {"on_turn": on_turn})

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn")

    reply = session(env_class, steps)
    assert fault in reply.error
    encode(EnvironmentReplies([reply]), 0)


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
    down, refused = less_line(first.error, __file__), less_line(second.error, __file__)
    assert down == f"{where.format('fetch')} failed with InfrastructureError: service is down"
    assert refused == f"{where.format('dial')} failed with ConnectionRefusedError: [Errno 111] refused"


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


def test_text_that_no_message_can_carry_is_replaced(monkeypatch):
    """Halves of surrogate pairs come from file names and from JSON."""
    # The log keeps such text as it is. pytest's record of it could not be sent between two test processes.
    monkeypatch.setattr("pipeline.environments.host._log.disabled", True)

    class Lister(Quiz):
        @tool
        async def names(self, fails: int) -> list[str]:
            if fails:
                raise RuntimeError("no \ud800")
            return ["a\udce4b"]

        async def on_turn(self, traj):
            return TurnResult(await self.call_tools(traj), metrics={"\ud800": 1.0})

        def on_truncated(self, traj, row, cause):
            raise ValueError("\ud800")

    async def steps(ask, host):
        await reset(ask)
        turns = [await ask("turn", calls=[("names", {"fails": fails})]) for fails in (0, 1)]
        return [*turns, await ask("truncate", cause="turns")]

    listed, failed, truncated = session(Lister, steps)
    encode(EnvironmentReplies([listed, failed, truncated]), 0)
    assert listed.result["messages"][0]["content"] == '["a?b"]' and listed.result["metrics"] == {"?": 1.0}
    assert failed.result["messages"][0]["content"] == "error: RuntimeError: no ?"
    assert less_line(truncated.error, __file__).endswith("failed with ValueError: ?")


def test_a_host_that_may_close_its_environments_is_not_killed_at_it():
    assert CANCEL_SECONDS + CLOSE_SECONDS < USER_CODE_END_SECONDS


def test_a_close_that_fails_does_not_touch_the_reward(caplog):
    env_class = raising("close", RuntimeError("stuck door"))

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn", text="yes")

    assert session(env_class, steps).result["reward"] == 1.0
    assert "Broken.close failed: RuntimeError: stuck door" in caplog.text


def test_more_text_than_a_message_may_hold_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("pipeline.environments.values.MAX_MESSAGE_CHARS", 20)

    class Long(Quiz):
        def on_turn(self, traj):
            return TurnResult("x" * 21)

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn"), num_episodes(host)

    reply, num_left = session(Long, steps)
    assert "failed with ValueError: Long.on_turn gave messages of 21 characters; they may have 20" in reply.error
    assert num_left == 0 and len(Long.closed) == 1


def test_what_a_message_holds_beside_its_text_counts(monkeypatch):
    monkeypatch.setattr("pipeline.environments.values.MAX_MESSAGE_CHARS", 50)

    class Heavy(Quiz):
        def on_turn(self, traj):
            return TurnResult([{"role": "user", "content": "see", "image": b"x" * 50}])

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn")

    assert "Heavy.on_turn gave messages of 62 characters; they may have 50" in session(Heavy, steps).error


def test_a_plain_reward_may_use_alarms():
    class Alarming(Quiz):
        def reward(self, traj, row):
            def rings(number, frame):
                raise TimeoutError("the grader took too long")

            before = signal.signal(signal.SIGALRM, rings)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            try:
                while True:
                    pass
            except TimeoutError:
                return 0.25
            finally:
                signal.signal(signal.SIGALRM, before)

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn", text="yes")

    assert session(Alarming, steps).result["reward"] == 0.25
