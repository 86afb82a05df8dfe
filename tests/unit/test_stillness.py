"""When a process counts as standing still, and what is said of it."""

import pytest

from pipeline.processes.worker.stillness import NAMED_SECONDS, Phase, Sight, Stillness
from workers.processes.process_stat import ProcessStat


def sight(heartbeat=1, *, phase=Phase.SERVING, state="S", ticks=0, moved=0, incarnation=0):
    return Sight(incarnation, phase, heartbeat, ProcessStat(state, ticks), moved)


def after(*sights, seconds=1.0):
    still = Stillness()
    for one in sights:
        still.see(one, seconds)
    return still


def test_a_heartbeat_that_moves_is_all_that_a_serving_process_needs():
    still = after(*(sight(beat) for beat in range(1, 9)))
    assert (still.seconds, still.is_named) == (0.0, False)


def test_silence_is_named_after_some_seconds_and_over_with_the_next_heartbeat():
    still = after(*[sight(1)] * 3)
    assert (still.seconds, still.is_named) == (2.0, False)
    still.see(sight(1), 1.0)
    assert still.seconds == NAMED_SECONDS and still.is_named
    assert still.words == "has given no sign of life for 3 s"
    still.see(sight(2), 1.0)
    assert (still.seconds, still.is_named) == (0.0, False)


def test_a_stopped_process_is_named_at_the_second_look():
    still = after(sight(1), sight(2, state="T"))
    assert not still.is_named  # it has moved since the look before
    still.see(sight(2, state="T"), 1.0)
    assert still.is_named and still.words == "has been stopped for 1 s (SIGSTOP, or a debugger)"


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (sight(state="R", ticks=300), "has computed for 3 s without a sign of life"),
        (sight(state="D"), "has waited for a disk or a device for 3 s"),
        (sight(state="t"), "has been stopped for 3 s (SIGSTOP, or a debugger)"),
    ],
)
def test_what_a_silent_process_does_instead_is_told(last, words):
    assert after(sight(), sight(), sight(), last).words == words


def test_what_is_told_is_what_it_does_now():
    computed = after(sight(), sight(), sight(), sight(ticks=300))
    computed.see(sight(ticks=300), 1.0)
    assert computed.words == "has given no sign of life for 4 s"


@pytest.mark.parametrize(
    "moving",
    [{"ticks": 1}, {"moved": 4096}, {"heartbeat": 2}],
)
def test_a_process_that_starts_gets_on_by_computing_or_reading_alone(moving):
    still = after(*[sight(phase=Phase.STARTING)] * 3)
    assert still.seconds == 2.0
    still.see(sight(**({"heartbeat": 1} | moving), phase=Phase.STARTING), 1.0)
    assert still.seconds == 0.0


def test_a_serving_process_that_computes_without_a_heartbeat_does_not_get_on():
    assert after(*(sight(1, ticks=100 * look, moved=look) for look in range(5))).seconds == 4.0


def test_an_idle_process_is_told_of_only_when_it_is_stopped():
    assert after(*[sight(0, phase=Phase.IDLE)] * 9).seconds == 0.0
    assert after(*[sight(0, phase=Phase.IDLE, state="T")] * 3).seconds == 2.0


@pytest.mark.parametrize("change", [{"incarnation": 1}, {"phase": Phase.STARTING}])
def test_a_new_incarnation_and_a_new_phase_begin_anew(change):
    assert after(*[sight(1)] * 4, sight(1, **change)).seconds == 0.0


def test_time_that_nobody_watched_does_not_count():
    """The supervisor was stopped itself, or everybody was, in a container that was suspended."""
    assert after(sight(1), sight(1), seconds=3600.0).seconds == 2.0
