"""What users' code may give, print, or set, and what an environment process makes of it: each case with its outcome."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import psutil
import pytest
from chat_models import CASES, write_chat_model
from environment_session import Quiz, reset, session

from pipeline.chat.model_chat import CUT_MARK, load_chat
from pipeline.env import ToolCall, TurnResult, tool
from pipeline.environments.call_time import end_alarm
from pipeline.environments.dropped_processes import let_go_of_pipes
from pipeline.environments.resumed_loop import run_to_end
from pipeline.environments.tool_calls import run_tool_call
from workers.message_codec import decode, encode
from workers.messages import EnvironmentReplies

PAYLOAD = json.loads((CASES / "HR59" / "payload.json").read_text(encoding="utf-8"))


def stub(case):
    spec = importlib.util.spec_from_file_location(f"stub_of_{case}", CASES / case / "stub.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def travelled(reply):
    """The reply as the supervisor gets it."""
    (received,) = decode(encode(EnvironmentReplies([reply]), 0))[1].replies
    return received


def turn_of(env_class, **options):
    """The reply to one turn, at the supervisor."""

    async def steps(ask, host):
        first = await ask("reset", row={"answer": "yes"}, seed=1)
        return first if first.error else await ask("turn", text="yes")

    return travelled(session(env_class, steps, **options))


def outcome(**result):
    """The reply to a turn for which `on_turn` gave this."""
    return turn_of(type("Gives", (Quiz,), {"on_turn": lambda self, traj: TurnResult(**result)}))


# --- HR59: values that pack here and not there ----------------------------------------------------------------------


def test_names_of_metrics_become_text_and_numbers_of_any_kind_floats():
    numbers = dict(PAYLOAD["int_key_map_pairs"])
    reply = outcome(messages="w", metrics={key: len(value) for key, value in numbers.items()})
    assert reply.error is None and reply.result["metrics"] == {"1": 1.0, "2": 1.0}
    reply = outcome(messages="w", metrics={"a": np.float32(1.5), "b": np.int64(3), "c": np.bool_(True)})
    assert reply.result["metrics"] == {"a": 1.5, "b": 3.0, "c": 1.0}


@pytest.mark.parametrize("value", ["a", tuple(PAYLOAD["tuple_as_list"]), nested(600), {}, None, float("nan")])
def test_a_metric_that_is_no_finite_number_is_refused_by_name(value):
    assert "the metric 'odd' is " in outcome(messages="w", metrics={"odd": value}).error


@pytest.mark.parametrize(
    ("extra", "arrives"),
    [({1: "a"}, {1: "a"}), ((1, 2), [1, 2]), (nested(90), nested(90))],
    ids=["int keys", "tuple", "deep"],
)
def test_what_messages_carry_beside_their_text_arrives(extra, arrives):
    message = {"role": "user", "content": "w", "info": extra}
    assert outcome(messages=[message]).result["messages"] == [message | {"info": arrives}]


@pytest.mark.parametrize(
    ("extra", "why"),
    [(np.float32(1.5), "numpy.float32"), (nested(600), "at most 100 levels"), ("half \ud83d", "surrogates")],
    ids=["numpy", "too deep", "half a pair"],
)
def test_what_no_message_can_carry_is_refused_where_it_was_made(extra, why):
    error = outcome(messages=[{"role": "user", "content": "w", "info": extra}]).error
    assert "Gives.on_turn gave the message" in error and why in error
    snapshots = {"recovery": "snapshot", "snapshot": lambda self: {"info": extra}}
    error = turn_of(type("Snaps", (Quiz,), snapshots)).error
    assert "Snaps.snapshot of trajectory 4.2 failed with TypeError: snapshot gave" in error and why in error


def test_text_that_is_too_large_for_any_model_is_refused():
    error = outcome(messages="w" * (PAYLOAD["big_text_mib"] << 20)).error
    assert "gave messages of 41,943,040 characters; they may have 16,777,216 at most" in error


# --- HR60: halves of a surrogate pair --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [json.loads(line)["prompt"] for line in open(CASES / "HR60" / "surrogate.jsonl")])
def test_a_half_of_a_pair_in_what_a_tool_gives_or_raises_is_replaced_and_whole_ones_come_through(text):
    class Says(Quiz):
        @tool
        async def say(self, loud: bool) -> str:
            if loud:
                raise ValueError(text)
            return text

        async def on_turn(self, traj):
            for loud in (False, True):
                said.append(await run_tool_call(self, traj, ToolCall("say", {"loud": loud})))
            return TurnResult(messages=said[0])

    said = []
    arrives = text.replace("\ud83d", "?") if "half" in text else text
    assert turn_of(Says).result["messages"][0]["content"] == arrives
    assert said == [arrives, f"error: ValueError: {arrives}"]


# --- HR74: alarms ----------------------------------------------------------------------------------------------------


def test_a_reward_may_time_itself_by_an_alarm():
    class Timed(Quiz):
        def on_turn(self, traj):
            return None

        def reward(self, traj, row):
            return stub("HR74").reward(0, traj.text)

    assert turn_of(Timed).result["reward"] == 1.0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_an_alarm_that_is_left_behind_goes_off_nowhere():
    """It would raise in the next trajectory's code, or in the loop."""

    def handler(number, frame):
        gone_off.append(number)

    class Leaves(Quiz):
        def on_turn(self, traj):
            signal.setitimer(signal.ITIMER_REAL, 0.02)

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", text="yes")
        await asyncio.sleep(0.05)
        return reply

    gone_off, before = [], signal.signal(signal.SIGALRM, handler)
    try:
        assert session(Leaves, steps).result["reward"] == 1.0
        assert gone_off == []
    finally:
        signal.signal(signal.SIGALRM, before)


def test_in_a_thread_an_alarm_is_none_of_its_affair():
    async def in_thread():
        await asyncio.to_thread(end_alarm)
        return signal.getitimer(signal.ITIMER_REAL)[0]

    signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        assert asyncio.run(in_thread()) > 0.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def test_a_handler_that_raises_into_the_loop_ends_nothing():
    """While the loop waits for its next timer, a thread signals the process."""

    def raises(number, frame):
        raised.append(number)
        raise TimeoutError("too late")

    def signal_soon():
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    async def waits():
        threading.Thread(target=signal_soon).start()
        while not raised:
            await asyncio.sleep(0.05)
        return "done"

    raised, loop, before = [], asyncio.new_event_loop(), signal.signal(signal.SIGUSR1, raises)
    try:
        assert run_to_end(loop, waits()) == "done"
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()


# --- HR77: tools that give, or print, without end --------------------------------------------------------------------


class Tools(Quiz):
    """A turn calls the tool of HR77 that its text names."""

    @tool
    def tool_big(self) -> str:
        return stub("HR77").tool_big(None)

    @tool
    def tool_multibyte(self) -> str:
        return stub("HR77").tool_multibyte(None)

    @tool
    def tool_flood(self) -> str:
        return stub("HR77").tool_flood(None)

    async def on_turn(self, traj):
        return TurnResult(messages=await self.call_tools(traj))


def called(name, **options):
    async def steps(ask, host):
        await reset(ask)
        return await ask("turn", text="", calls=[(name, {})])

    return travelled(session(Tools, steps, **options))


@pytest.mark.parametrize("name", ["tool_big", "tool_multibyte"])
def test_a_result_is_cut_at_its_tokens_whatever_is_returned(name, tmp_path):
    """No process holds more of it than the tool itself does."""
    tracemalloc.start()
    try:
        reply = called(name, max_tool_chars=200 * 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (message,) = reply.result["messages"]
    assert len(message["content"]) <= 200 * 64
    text = load_chat(write_chat_model(tmp_path, "qwen3")).cut(message["content"], 200, message.get("cut", False))
    kept = text.removesuffix(CUT_MARK)
    assert text.endswith(CUT_MARK) and stub_result(name).startswith(kept) and kept.encode()
    assert peak < 200 * 2**20 * (name == "tool_big") + 50 * 2**20


def stub_result(name):
    return getattr(stub("HR77"), name)(None)


def children():
    return set(psutil.Process().children())


def test_a_process_that_prints_to_nobody_ends_with_its_trajectory():
    """HR77: the tool gives the process itself, which is no text, and so nobody holds it."""

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", text="", calls=[("tool_flood", {})])
        printing = children() - before
        await ask("drop")
        return reply, printing

    before = children()
    reply, printing = session(Tools, steps, max_tool_chars=100)
    assert "not JSON serializable" in reply.result["messages"][0]["content"] and len(printing) == 1
    assert not psutil.wait_procs(printing, timeout=20.0)[1]


def test_a_process_whose_output_somebody_reads_goes_on():
    command = [sys.executable, "-c", "import sys; print('first', flush=True); sys.stdin.read(); print('last')"]
    ours, theirs = os.pipe()
    try:
        output = subprocess.Popen(command, stdin=ours, stdout=subprocess.PIPE).stdout
        assert output.readline() == b"first\n"
        let_go_of_pipes()
        os.close(theirs)
        theirs = None
        assert output.read() == b"last\n"
    finally:
        os.close(ours)
        if theirs is not None:
            os.close(theirs)
