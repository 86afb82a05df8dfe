"""When a run counts as stalled, what is written then, and how it goes on or ends."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from pipeline.stalls import run_report
from pipeline.stalls.run_report import moves_of
from pipeline.stalls.stall_watch import Stall, StallWatch
from pipeline.stalls.tasks import task_lines
from pipeline.user_warnings import RunWarning
from shm.ledger import Activity, Ledger, LedgerShape
from workers.processes.process_stat import ProcessStat


def seen(stall, moves, seconds=1.0):
    return [stall.see(one, seconds) for one in moves]


def test_a_stall_is_told_once_when_nothing_has_moved_for_the_time_out():
    assert seen(Stall(3.0), [7] * 9) == [False, False, False, True] + [False] * 5


def test_what_moves_begins_anew_and_another_stall_is_told_again():
    stall = Stall(2.0)
    assert seen(stall, [7, 7, 8, 8, 8, 8]) == [False, False, False, False, True, False]
    assert seen(stall, [9, 9, 9]) == [False, False, True]


def test_nothing_need_move_while_the_caller_has_the_step():
    assert not any(seen(Stall(2.0), [None] * 50))


def test_time_in_which_this_process_itself_stood_still_does_not_count():
    assert seen(Stall(300.0), [7] * 10, seconds=3600.0) == [False] * 10


class Watched:
    """A run in which nothing moves, watched until it is told of."""

    def __init__(self, directory, monkeypatch, *, stops):
        monkeypatch.setattr("pipeline.stalls.stall_watch.LOOK_SECONDS", 0.01)
        self.directory, self.errors, self.told = directory, [], asyncio.Event()
        self.watch = StallWatch(
            directory,
            0.02,
            moves=lambda: (1, 2),
            report=self.report,
            waits_for=lambda: "the learner",
            fail=self.errors.append,
            stops=stops,
        )

    async def report(self):
        self.told.set()
        return {"ledger": {"policy_version": 3}, "odd": {1}}

    async def run(self):
        with self.watch.watching():
            await self.told.wait()
            await asyncio.sleep(0.05)

    @property
    def files(self):
        return list(self.directory.glob("stall-*.json"))


def test_it_writes_one_file_and_continues(tmp_path, monkeypatch):
    async def run():
        watched = Watched(tmp_path, monkeypatch, stops=False)
        await watched.run()
        return watched

    with pytest.warns(RunWarning) as warned:
        watched = asyncio.run(run())
    (path,) = watched.files
    found = json.loads(path.read_text())
    assert found["waits_for"] == "the learner" and found["ledger"] == {"policy_version": 3}
    assert found["seconds"] >= 0.02
    assert [str(one.message) for one in warned] == [
        f"Nothing has moved in this run for 0 s: it waits: the learner; what every process is at is in {path}. "
        'It continues, as on_stall is "continue".'
    ]


def test_it_ends_the_run_if_that_was_asked_for_also_where_nothing_can_be_written(tmp_path, monkeypatch):
    async def run():
        watched = Watched(tmp_path / "gone", monkeypatch, stops=True)
        await watched.run()
        return watched.errors

    (error,) = asyncio.run(run())
    assert "Nothing has moved" in str(error) and "can't be written: No such file" in str(error)
    assert str(error).endswith('It ends, as on_stall is "stop".')


def test_what_breaks_in_the_watch_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.stalls.stall_watch.LOOK_SECONDS", 0.001)

    def broken():
        raise ZeroDivisionError

    async def run():
        failed = asyncio.get_running_loop().create_future()
        watch = StallWatch(tmp_path, 1.0, moves=broken, report=None, waits_for=str, fail=failed.set_result, stops=False)
        with watch.watching():
            return await failed

    assert isinstance(asyncio.run(run()), ZeroDivisionError)


@pytest.mark.parametrize(("looks", "warns"), [(False, True), (True, False)], ids=["blocked", "awaited"])
def test_a_caller_that_lets_nothing_else_run_between_two_steps_is_told_of_it_once(tmp_path, recwarn, looks, warns):
    now = [0.0]
    watch = StallWatch(
        tmp_path, 1e6, moves=int, report=None, waits_for=str, fail=None, stops=False, clock=lambda: now[0]
    )

    def hold(step):
        with watch.with_caller(step):
            for _ in range(540):
                now[0] += 1.0
                if looks:
                    asyncio.run(watch.look())

    for step in (2, 3):
        hold(step)
    told = [str(one.message) for one in recwarn if one.category is RunWarning and "event loop" in str(one.message)]
    assert len(told) == warns and all(
        "let nothing else in its event loop run for 540 s after step 2" in one for one in told
    )


def test_equal_tasks_are_told_together_down_to_where_they_wait():
    async def inner(event):
        await event.wait()

    async def outer(event):
        await inner(event)

    async def run():
        event = asyncio.Event()
        tasks = [asyncio.ensure_future(outer(event)) for _ in range(3)]
        await asyncio.sleep(0)
        lines = task_lines()
        event.set()
        await asyncio.gather(*tasks)
        return lines

    first = asyncio.run(run())[0]
    assert first.startswith("3 × ") and "outer (unit/test_stall_watch.py:" in first
    assert first.index("outer") < first.index("inner") < first.index("Event.wait (asyncio/locks.py:")


def test_what_moves_is_work_and_no_sign_of_life_alone(monkeypatch):
    shape = LedgerShape(num_slots=0, num_reservations=0, num_workers=2)
    ledger = Ledger(memoryview(bytearray(shape.num_bytes)), shape)
    ledger.format(run_id=1)
    learner, sampler = (ledger.worker(index) for index in range(2))
    ticks, handle = [5], SimpleNamespace(role="learner", index=0, pid=7, is_starting=False)
    run = SimpleNamespace(
        time_rows={"learner": learner, "sampler-0": sampler},
        workers=SimpleNamespace(learner=handle, all=[handle]),
        events=SimpleNamespace(num_moves=0),
    )
    monkeypatch.setattr(run_report, "read_stat", lambda pid: ProcessStat("R", ticks[0]))

    def moves(act):
        before = moves_of(run)
        act()
        return moves_of(run) != before

    for row in (learner, sampler):
        row.introduce(7, 0)
        row.beat(Activity.WAITING, 3)
    assert not moves(lambda: learner.beat(Activity.WAITING))
    assert not moves(lambda: sampler.beat(Activity.BUSY)), "it may beat over a request that it never gets on with"
    assert moves(lambda: sampler.beat(Activity.BUSY, 4))
    learner.beat(Activity.BUSY)
    assert moves(lambda: learner.beat(Activity.BUSY)), "a batch that takes longer than stall_timeout is no stall"
    assert moves(lambda: setattr(run.events, "num_moves", 1))
    assert not moves(lambda: ticks.append(ticks.pop() + 1))
    handle.is_starting = True
    assert moves(lambda: ticks.append(ticks.pop() + 1)), "a large model is being loaded"
