"""A call's time is its own: what others hold the loop for isn't counted, and whoever is in user code can be seen."""

import asyncio
import contextvars
import threading
import time

import pytest
from environment_session import ROW, Quiz, reset, session

from pipeline.env import TurnResult, tool
from pipeline.environments.activity import METHODS, NUM_BYTES, NUM_ENTRIES, ActivityBoard, private_board
from pipeline.environments.call_time import CALL, CallTime, LoopTime
from pipeline.environments.host import EnvironmentHost
from shm.ledger import Activity
from workers.messages import EnvironmentCall


def test_plain_rewards_one_after_the_other_each_have_their_whole_time():
    """24 of 0.05 s take twice the 0.6 s that one may take."""

    class Slow(Quiz):
        async def on_turn(self, traj):
            await asyncio.sleep(0)

        def reward(self, traj, row):
            time.sleep(0.05)
            return 1.0

    async def steps(ask, host):
        for member in range(24):
            await ask("reset", member=member, row=ROW, seed=1)
        return await asyncio.gather(*(ask("turn", member=member) for member in range(24)))

    replies = session(Slow, steps, timeout=0.6)
    assert [reply.error for reply in replies] == [None] * 24
    assert max(reply.seconds for reply in replies) > 1.0


def test_a_call_that_takes_its_time_in_many_steps_is_past_its_deadline():
    class Busy(Quiz):
        async def on_turn(self, traj):
            while True:
                time.sleep(0.01)
                await asyncio.sleep(0)

    async def steps(ask, host):
        await reset(ask)
        return await ask("turn")

    assert "took longer than environment_timeout" in session(Busy, steps, timeout=0.2).error


class Seen(Quiz):
    """Notes what a reader of its board sees from within."""

    async def on_turn(self, traj):
        self.looks.append(self.board.look())
        task = asyncio.create_task(self.child())
        await asyncio.gather(task, asyncio.to_thread(self.beside), self.call_tools(traj))
        return TurnResult("more")

    async def child(self):
        await asyncio.sleep(0)
        self.looks.append(self.board.look())

    def beside(self):
        self.threads.append((threading.get_native_id(), self.board.look()))

    @tool
    def plain(self) -> str:
        self.beside()
        return ""


def test_whoever_runs_is_on_the_board():
    Seen.board, Seen.looks, Seen.threads, Seen.closed = private_board(), [], [], []

    async def run():
        host = EnvironmentHost(Seen, timeout=60.0, name="Seen", board=Seen.board)
        await host.handle(EnvironmentCall(7, 4, 2, "reset", {"row": ROW, "seed": 1}))
        argument = {"text": "", "num_tokens": 1, "stopped": True, "tool_calls": [{"name": "plain", "arguments": {}}]}
        reply = await host.handle(EnvironmentCall(8, 4, 2, "turn", argument))
        await host.close()
        return reply

    assert asyncio.run(run()).error is None
    main = threading.get_native_id()
    assert [(look.loop.request, look.loop.method, look.loop.thread) for look in Seen.looks] == [
        (8, "on_turn", main)
    ] * 2
    for thread, look in Seen.threads:
        assert (8, "on_turn", thread) in [(one.request, one.method, one.thread) for one in look.beside]
    assert len(Seen.threads) == 2 and Seen.board.look().everyone == []


def test_a_call_that_does_not_end_when_cancelled_stays_on_the_board():
    class Stubborn(Quiz):
        async def on_turn(self, traj):
            while not self.release.is_set():
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    pass

    Stubborn.release, Stubborn.closed, board = threading.Event(), [], private_board()

    async def run():
        host = EnvironmentHost(Stubborn, timeout=0.05, grace=0.05, name="Stubborn", board=board)
        await host.handle(EnvironmentCall(7, 4, 2, "reset", {"row": ROW, "seed": 1}))
        argument = {"text": "", "num_tokens": 1, "stopped": True, "tool_calls": []}
        reply = await host.handle(EnvironmentCall(8, 4, 2, "turn", argument))
        beside = board.look().beside
        Stubborn.release.set()
        await host.close()
        return reply, beside

    reply, beside = asyncio.run(run())
    assert reply.error.endswith("does not end when cancelled")
    assert [(one.request, one.method, one.thread) for one in beside] == [(8, "on_turn", 0)]
    assert board.look().everyone == []


def test_what_others_hold_the_loop_for_is_not_counted(monkeypatch):
    now = [100]
    monkeypatch.setattr("pipeline.environments.call_time.now_ns", lambda: now[0])
    loop_time = LoopTime(private_board())
    first, second = CallTime(loop_time, 1), CallTime(loop_time, 2)

    def step(call, nanoseconds):
        call.enter()
        now[0] += nanoseconds
        call.leave()

    step(first, 5)
    now[0] += 10  # both wait: for the first this is time
    assert (first.used_ns(), second.used_ns()) == (15, 0)
    step(second, 1000)
    step(first, 2)
    assert (first.used_ns(), second.used_ns()) == (17, 1000)


def test_a_board_that_is_full_notes_no_more_and_has_room_again():
    board = private_board()
    releases = [board.claim(request, 5, METHODS.index("reward"), 77) for request in range(1, NUM_ENTRIES + 3)]
    assert [one.request for one in board.look().beside] == list(range(1, NUM_ENTRIES + 1))
    for release in releases:
        release()
    assert board.look().everyone == []
    release = board.claim(9, 5, METHODS.index("reward"), 77)
    assert board.look().beside == [(9, 5, "reward", 77)]
    release()


def test_a_new_host_finds_the_board_of_the_one_before_empty():
    view = memoryview(bytearray(NUM_BYTES))
    board = ActivityBoard(view)
    board.format()
    board.introduce(5, 0)
    board.enter_loop(3, 10, 1)
    board.claim(4, 11, 2, 78)
    assert [one.request for one in ActivityBoard(view).look().everyone] == [3, 4]
    ActivityBoard(view).introduce(6, 1)
    assert board.look().everyone == [] and board.row.read().pid == 6


@pytest.mark.parametrize("inherits", [True, False])
def test_tasks_outside_calls_are_none_of_theirs(inherits):
    async def run():
        loop_time = LoopTime(private_board())
        loop_time.attach(asyncio.get_running_loop())
        context = contextvars.copy_context()
        if inherits:
            context.run(CALL.set, CallTime(loop_time, 5))

        async def look():
            return loop_time.board.look().loop

        found = await asyncio.get_running_loop().create_task(look(), context=context)
        loop_time.detach()
        return None if found is None else found.request

    assert asyncio.run(run()) == (5 if inherits else None)


def test_a_host_that_nobody_asks_anything_still_gives_signs_of_life(monkeypatch):
    monkeypatch.setattr("pipeline.environments.call_time.BEAT_SECONDS", 0.001)
    board = private_board()

    async def run():
        host = EnvironmentHost(Quiz, timeout=60.0, name="Quiz", board=board)
        host.open()
        before = board.look().heartbeat_ns
        while board.look().heartbeat_ns == before:
            await asyncio.sleep(0.001)
        await host.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert board.row.read().activity == Activity.IDLE
