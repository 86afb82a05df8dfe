"""Who holds up an environment process: the rule, for each way to stand still."""

import pytest

from pipeline.environments.activity import Entry, Look
from pipeline.processes.environment.environment_culprit import judge

SECOND = 10**9
NOW = 1000 * SECOND
LIMIT = 8 * SECOND
MAIN, FIRST, SECOND_THREAD = 50, 51, 52


def entry(request, seconds, thread=MAIN, method="reward"):
    return Entry(request, NOW - seconds * SECOND, method, thread)


def verdict(look, before=None, busy=(), halted=False, silence=LIMIT, step=LIMIT):
    """before: an earlier look, this one by default."""
    return judge(
        look if before is None else before,
        look,
        now_ns=NOW,
        limit_ns=LIMIT,
        step_ns=step,
        silence_ns=silence,
        busy_threads=set(busy),
        halted=halted,
    )


def silent(seconds, loop=None, beside=()):
    return Look(NOW - seconds * SECOND, loop, list(beside))


def beating(loop=None, beside=()):
    """(a look, the one before it)"""
    look = Look(NOW, loop, list(beside))
    return look, look._replace(heartbeat_ns=NOW - SECOND)


def test_what_takes_its_time_is_left_alone():
    assert verdict(*beating(beside=[entry(1, 7, FIRST)])) is None
    assert verdict(silent(7, loop=entry(1, 7)), busy=[MAIN]) is None
    assert verdict(silent(7)) is None


def test_short_steps_of_one_late_call_are_no_hang():
    """A coroutine past its deadline is its own host's affair."""
    assert verdict(*beating(loop=entry(1, 100))) is None


def test_a_step_that_does_not_end_is_blamed_on_its_call():
    found = verdict(silent(9, loop=entry(1, 9)))
    assert [one.request for one in found.blamed] == [1] and not found.loop_runs
    assert verdict(silent(3, loop=entry(1, 9))).blamed == found.blamed  # it had used time before this step


def test_a_step_that_holds_the_loop_is_not_given_the_time_to_be_cancelled_in():
    look = silent(5, loop=entry(1, 5))
    assert verdict(look) is None and verdict(look, step=4 * SECOND).blamed == (look.loop,)
    assert verdict(silent(2, loop=entry(1, 5)), step=4 * SECOND) is None  # the loop may have gone on
    assert verdict(look, step=4 * SECOND, halted=True) is None  # it is not the call that takes so long
    waiting = entry(2, 5, FIRST)
    found = verdict(silent(5, loop=entry(1, 5), beside=[waiting]), busy=[MAIN, FIRST], step=4 * SECOND)
    assert [one.request for one in found.blamed] == [1]


def test_a_short_silence_counts_where_calls_are_short():
    late = silent(2, loop=entry(1, 9))
    assert [one.request for one in verdict(late, silence=SECOND).blamed] == [1]
    assert verdict(late) is None


def test_a_step_that_is_new_since_the_look_before_is_left_alone():
    look = silent(3, loop=entry(2, 9))
    assert verdict(look, before=look._replace(loop=entry(1, 9))) is None


def test_threads_that_go_on_after_their_time_are_blamed_alone_and_the_loop_could_go_on():
    late, other = entry(1, 9, FIRST), entry(2, 3, SECOND_THREAD)
    found = verdict(*beating(beside=[late, other]))
    assert found.blamed == (late,) and found.loop_runs


def test_who_holds_the_interpreter_is_told_from_those_who_wait_for_it():
    waiting, holding = entry(1, 20, FIRST), entry(2, 6, SECOND_THREAD)
    found = verdict(silent(9, beside=[waiting, holding]), busy=[SECOND_THREAD])
    assert found.blamed == (holding,) and not found.loop_runs
    found = verdict(silent(9, loop=entry(3, 9), beside=[waiting, holding]), busy=[SECOND_THREAD])
    assert found.blamed == (holding,)


def test_of_two_that_compute_the_late_one_is_blamed():
    late, early = entry(1, 9, FIRST), entry(2, 3, SECOND_THREAD)
    assert verdict(silent(9, beside=[late, early]), busy=[FIRST, SECOND_THREAD]).blamed == (late,)


@pytest.mark.parametrize("halted", [True, False])
def test_a_process_that_stands_still_by_itself_is_nobodys_fault(halted):
    loop = entry(1, 9) if halted else None
    found = verdict(silent(9, loop=loop), halted=halted)
    assert found.blamed == () and found.why.startswith("was stopped (SIGSTOP" if halted else "stood still")


def test_an_agent_may_take_long_but_not_hold_the_loop():
    found = judge(
        silent(9, loop=entry(1, 9)),
        silent(9, loop=entry(1, 9)),
        now_ns=NOW,
        limit_ns=10**18,
        step_ns=10**18,
        silence_ns=LIMIT,
        busy_threads=set(),
        halted=False,
    )
    assert [one.request for one in found.blamed] == [1]
