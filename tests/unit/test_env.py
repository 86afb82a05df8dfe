"""`Env` as users write it: defaults, tool calls, messages, checks. No process, no host."""

import asyncio
import threading
import time

import pytest

from pipeline.env import Env, ToolCall, TrajectoryView, Turn, TurnResult, as_messages, check_env_class, tool
from pipeline.environments.tool_calls import is_infrastructure
from pipeline.environments.tool_threads import ToolThreads
from pipeline.errors import ConfigError, ConfigTypeError, InfrastructureError


class Shop(Env):
    def __init__(self):
        self.opened = asyncio.Event()
        self.seen = []

    def reset(self, row):
        return "buy"

    def reward(self, traj, row):
        return 1.0

    @tool
    async def wait_for_opening(self, name: str) -> str:
        await self.opened.wait()
        self.seen.append(name)
        return f"{name} done"

    @tool
    async def open_shop(self) -> None:
        self.seen.append("open")
        self.opened.set()

    @tool
    def price(self, item: str) -> dict:
        return {"item": item, "thread": threading.current_thread() is threading.main_thread()}

    @tool
    async def fail(self, kind: str) -> str:
        raise {"value": ValueError("bad\n  luck"), "infrastructure": InfrastructureError("disk gone")}[kind]


def view(*calls):
    traj = TrajectoryView(2, 1, [{"role": "user", "content": "buy"}])
    traj.turns.append(Turn("text", tuple(calls), 5, True))
    return traj


def call(name, /, **arguments):
    return ToolCall(name, arguments)


def contents(messages):
    return [message["content"] for message in messages]


def test_a_turn_without_a_call_ends_the_episode():
    assert asyncio.run(Shop().on_turn(view())) is None


def test_the_default_on_turn_answers_with_tool_messages():
    result = asyncio.run(Shop().on_turn(view(call("open_shop"))))
    assert result == TurnResult(messages=[{"role": "tool", "name": "open_shop", "content": ""}])


def test_calls_of_one_turn_run_in_parallel_and_are_answered_in_call_order():
    """The first can only end after the second has run."""
    env, traj = Shop(), view(call("wait_for_opening", name="first"), call("open_shop"))
    messages = asyncio.run(env.call_tools(traj))
    assert env.seen == ["open", "first"]
    assert contents(messages) == ["first done", ""]
    assert [record.name for record in traj.tool_records] == ["open_shop", "wait_for_opening"]  # as they ended


def test_plain_tools_run_in_threads_at_the_same_time():
    both = threading.Barrier(2, timeout=30)

    class Pair(Shop):
        @tool
        def meet(self) -> bool:
            both.wait()
            return threading.current_thread() is threading.main_thread()

    messages = asyncio.run(Pair().call_tools(view(call("meet"), call("meet"))))
    assert contents(messages) == ["false", "false"]


def test_results_that_are_no_text_reach_the_model_as_json():
    messages = asyncio.run(Shop().call_tools(view(call("price", item="tea"))))
    assert contents(messages) == ['{"item": "tea", "thread": false}']


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (call("sell"), "error: there is no tool 'sell'; the tools: wait_for_opening, open_shop, price, fail"),
        (call("price"), "error: price needs the argument 'item'; it must be a string"),
        (call("price", item=[]), "error: argument 'item' of price is []; it must be a string"),
        (ToolCall("price", {}, "not JSON"), "error: not JSON"),
        (call("fail", kind="value"), "error: ValueError: bad luck"),
    ],
)
def test_a_wrong_call_becomes_text_for_the_model_and_an_error_in_its_record(wrong, text):
    traj = view(wrong)
    assert contents(asyncio.run(Shop().call_tools(traj))) == [text]
    assert [(record.name, record.error) for record in traj.tool_records] == [(wrong.name, text.removeprefix("error: "))]
    assert traj.running_tools == []


def test_infrastructure_errors_pass_through_and_cancel_the_other_calls():
    env, traj = Shop(), view(call("wait_for_opening", name="never"), call("fail", kind="infrastructure"))

    async def run():
        with pytest.raises(InfrastructureError, match="disk gone"):
            await env.call_tools(traj)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1  # only this one
    assert env.seen == [] and "fail" in traj.running_tools


def test_what_counts_as_infrastructure():
    import urllib.error

    foreign = type("ReadTimeout", (type("TransportError", (Exception,), {"__module__": "httpx"}),), {})
    for failure in (
        TimeoutError(),
        ConnectionResetError(),
        InfrastructureError(),
        foreign(),
        urllib.error.URLError("x"),
    ):
        assert is_infrastructure(failure), failure
    for failure in (ValueError(), FileNotFoundError(), urllib.error.HTTPError("u", 404, "no", None, None)):
        assert not is_infrastructure(failure), failure


def test_the_view_shows_the_last_turn():
    traj = TrajectoryView(2, 1, [])
    assert (traj.text, traj.tool_calls, traj.num_turns, traj.last_turn) == ("", (), 0, None)
    traj.turns += [Turn("a", (), 3, True), Turn("b", (call("x"),), 4, False)]
    assert (traj.text, traj.tool_calls, traj.num_turns, traj.num_generated_tokens) == ("b", (call("x"),), 2, 7)


@pytest.mark.parametrize("cap", [0, -1, 2.0, True])
def test_a_turn_cap_is_a_positive_integer(cap):
    with pytest.raises(ConfigError, match="max_turn_tokens"):
        TurnResult(messages=[], max_turn_tokens=cap)


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"messages": None}, TypeError, "messages is None.*return None"),
        ({"done": 1}, TypeError, "done is 1"),
        ({"done": True, "messages": "more"}, ValueError, "no turn follows"),
        ({"done": True, "max_turn_tokens": 3}, ValueError, "no turn follows"),
    ],
)
def test_a_result_either_ends_the_episode_or_says_what_follows(options, error, parts):
    with pytest.raises(error, match=parts):
        TurnResult(**options)


def test_a_string_stands_for_one_user_message():
    assert as_messages("hello", "X.reset") == [{"role": "user", "content": "hello"}]
    assert as_messages(({"role": "tool", "content": "a"},), "X.reset") == [{"role": "tool", "content": "a"}]


@pytest.mark.parametrize(
    "value",
    [None, 3, ["hello"], [{"role": "user"}], [{"role": "robot", "content": "a"}], [{"role": "user", "content": 3}]],
)
def test_other_messages_are_refused_and_their_source_named(value):
    with pytest.raises(ConfigTypeError, match=r"X\.reset gave"):
        as_messages(value, "X.reset")


def called(**function):
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    ]


def test_messages_may_hold_calls_with_arguments_as_an_object_or_as_its_json():
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        messages = called(name="look", arguments=arguments)
        assert as_messages(messages, "X.reset") == messages


@pytest.mark.parametrize(
    "value",
    [
        called(name="look", arguments='{"city": '),
        called(name="look", arguments="[1]"),
        called(name="look"),
        called(arguments={}),
        [{"role": "assistant", "content": "", "tool_calls": {"function": {"name": "look"}}}],
        [{"role": "assistant", "content": "", "tool_calls": ["look"]}],
    ],
)
def test_calls_of_another_form_are_refused(value):
    with pytest.raises(ConfigTypeError, match=r"X\.reset gave the message .* Its tool_calls are a list of calls"):
        as_messages(value, "X.reset")


def test_an_environment_class_is_checked_before_a_run():
    class NoReward(Env):
        def reset(self, row):
            return ""

    class OddRecovery(Shop):
        recovery = "magic"

    class BadTools(Shop):
        tools = [print]

    class NoRow(Shop):
        def reset(self):
            return ""

    class NoCause(Shop):
        async def on_truncated(self, traj, row):
            return 0.0

    class Decorated(Shop):
        @staticmethod
        def on_turn(*anything):
            return None

    check_env_class(Shop)
    check_env_class(Decorated)
    for wrong, fault in [
        (NoReward, "has no reward"),
        (OddRecovery, "'magic'"),
        (BadTools, "no tool"),
        (NoRow, r"NoRow.reset takes \(\), but is called as reset\(row\) \(.*\). Write it so."),
        (NoCause, r"NoCause.on_truncated takes \(traj, row\), but is called as on_truncated\(traj, row, cause\)"),
        (Shop(), "must be a class"),
        (dict, "must be a class derived from Env"),
    ]:
        with pytest.raises(ConfigTypeError, match=fault):
            check_env_class(wrong)


def test_tool_threads_are_used_again_and_give_back_exceptions():
    threads = ToolThreads()

    async def run():
        for _ in range(20):
            await threads.run(lambda: None)
            while threads._idle < 1:  # the thread counts itself idle just before it answers
                await asyncio.sleep(0)
        assert threads.num_threads == 1
        with pytest.raises(SystemExit):
            await threads.run(exit)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await threads.run(lambda: next(iter(())))
        return threads.num_threads

    assert asyncio.run(run()) == 1


def test_a_tool_thread_outlives_a_loop_that_closed_before_its_answer():
    threads, release, ended = ToolThreads(), threading.Event(), threading.Event()

    def late():
        release.wait(30)
        ended.set()

    async def give_up():
        threads.run(late).cancel()

    asyncio.run(give_up())
    release.set()
    assert ended.wait(30)

    async def again():
        return await threads.run(lambda: "alive")

    assert asyncio.run(again()) == "alive"


def test_tool_threads_end_after_idling(monkeypatch):
    monkeypatch.setattr("pipeline.environments.tool_threads.IDLE_SECONDS", 0.01)
    threads = ToolThreads()

    async def run():
        await threads.run(lambda: None)

    asyncio.run(run())
    deadline = time.monotonic() + 30
    while threads.num_threads and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threads.num_threads == 0
    asyncio.run(run())  # and a new one is made
