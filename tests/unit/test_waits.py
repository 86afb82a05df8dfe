"""Waits: whose fault, how long, in events that add up."""

import json

import pytest

from pipeline.run_dir.events import EventLog
from pipeline.stalls.waits import Culprit, Waits


def tool(group=4, trajectory="4.1"):
    return Culprit("tool", group, trajectory, f"group {group} must train by version 6")


READY = Culprit("ready", 5, None, "too few finished groups")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(tmp_path, clock):
    events = EventLog(tmp_path / "events.jsonl", clock)
    yield events
    events.close()


@pytest.fixture
def waits(log, clock):
    return Waits(log, clock)


@pytest.fixture
def told(log, tmp_path):
    """The `wait` events so far, without their time."""

    def read():
        log.flush()
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        return [{key: value for key, value in event.items() if key not in ("t", "event")} for event in events]

    return read


def test_wait_is_told_at_its_end_with_its_culprit_and_length(waits, clock, told):
    waits.begin(7, tool())
    assert waits.words == tool().detail and told() == []
    clock.now += 1.5
    waits.end()
    assert waits.words == ""
    assert told() == [
        {
            "step": 7,
            "seconds": 1.5,
            "group": 4,
            "trajectory": "4.1",
            "why": "tool",
            "detail": "group 4 must train by version 6",
        }
    ]


def test_a_wait_that_goes_on_has_the_words_of_its_latest_begin(waits, clock, told):
    waits.begin(7, Culprit("ready", 5, None, "0 of 2"))
    clock.now += 1.0
    waits.begin(7, Culprit("ready", 5, None, "1 of 2"))
    assert waits.words == "1 of 2"
    waits.end()
    assert [(event["seconds"], event["detail"]) for event in told()] == [(1.0, "1 of 2")]


def test_end_without_a_wait_tells_nothing(waits, told):
    waits.end()
    assert told() == []


def test_same_culprit_goes_on_and_another_starts_a_wait_of_its_own(waits, clock, told):
    waits.begin(7, tool())
    clock.now += 1.0
    waits.begin(7, tool(trajectory="4.0"))  # the same group for the same reason
    clock.now += 1.0
    waits.begin(7, READY)
    clock.now += 0.25
    waits.begin(7, tool(group=9))
    clock.now += 0.5
    waits.end()
    assert [(event["why"], event["group"], event["seconds"]) for event in told()] == [
        ("tool", 4, 2.0),
        ("ready", 5, 0.25),
        ("tool", 9, 0.5),
    ]


def test_lasting_wait_is_reported_in_parts_that_add_up(waits, clock, told):
    waits.begin(7, tool())
    clock.now += 10.0
    waits.look(tool())
    clock.now += 10.0
    waits.look(READY)  # by now it is for something else
    clock.now += 3.0
    waits.end()
    assert [(event["why"], event["seconds"]) for event in told()] == [("tool", 10.0), ("tool", 10.0), ("ready", 3.0)]


def test_a_wait_is_reported_though_something_else_comes_again_and_again(waits, clock, told):
    """Groups that finish, but not the one that is waited for: nobody has the time for a look."""
    for _ in range(50):
        waits.begin(7, tool())
        clock.now += 0.5
    assert [event["seconds"] for event in told()] == [10.0, 10.0]


def test_report_is_on_disk_at_once(waits, log, clock, tmp_path):
    waits.begin(7, tool())
    clock.now += 9.5
    log.log("ready", group=3)  # goes to the system, and with it what comes within a second, but later
    clock.now += 0.5
    waits.look(tool())
    assert '"seconds": 10.0' in (tmp_path / "events.jsonl").read_text()


def test_pull_that_lasts_is_divided_between_the_causes_as_its_events_are(waits, clock, told):
    waits.begin_counting("tool")
    waits.begin(7, tool())
    clock.now += 10.0
    waits.look(Culprit("sampling", 4, "4.1", ""))
    clock.now += 10.0
    waits.look(Culprit("reward", 4, "4.1", ""))
    clock.now += 1.5
    waits.end_counting()
    waits.end()
    assert (waits.bound_count, waits.bound_seconds) == (1, 21.5)
    assert waits.by_cause == {"tool": 10.0, "sampling": 10.0, "reward": 1.5}
    assert {event["why"]: event["seconds"] for event in told()} == waits.by_cause


def test_pull_that_does_not_count_adds_nothing(waits, clock):
    waits.begin(7, READY)
    clock.now += 10.0
    waits.look(READY)
    waits.end_counting()
    assert (waits.bound_count, waits.bound_seconds, waits.by_cause) == (0, 0.0, {})


def test_pulls_at_the_bound_are_summed_by_cause_until_the_next_batch(waits, clock):
    for cause, seconds in (("tool", 1.0), ("sampling", 0.5), ("tool", 2.0)):
        waits.begin_counting(cause)
        clock.now += seconds
        waits.end_counting()
    assert (waits.bound_count, waits.bound_seconds) == (3, 3.5)
    assert waits.by_cause == {"tool": 3.0, "sampling": 0.5}
    waits.reset()
    assert (waits.bound_count, waits.bound_seconds, waits.by_cause) == (0, 0.0, {})


def test_reset_does_not_end_a_wait(waits, clock, told):
    waits.begin(7, tool())
    waits.reset()
    clock.now += 1.0
    waits.end()
    assert [event["seconds"] for event in told()] == [1.0]


def test_looks_at_a_wait_that_goes_on_tell_nothing_before_its_report_is_due(waits, clock, told):
    waits.begin(7, tool())
    for _ in range(9):
        clock.now += 1.0
        waits.look(tool(trajectory="4.2"))
    assert told() == []
    clock.now += 1.0
    waits.look(tool(trajectory="4.0"))
    assert [(event["seconds"], event["trajectory"]) for event in told()] == [(10.0, "4.0")]


def test_another_reason_is_told_when_it_is_seen_and_takes_its_own_time(waits, clock, told):
    waits.begin_counting("tool")
    waits.begin(7, tool())
    clock.now += 3.0
    waits.look(Culprit("sampling", 4, "4.1", ""))
    clock.now += 2.0
    waits.end_counting()
    waits.end()
    assert [(event["why"], event["seconds"]) for event in told()] == [("tool", 3.0), ("sampling", 2.0)]
    assert waits.by_cause == {"tool": 3.0, "sampling": 2.0}


def test_a_process_that_begins_to_stand_still_is_told_at_once_and_stands_behind_every_detail(log, clock, told):
    still = [""]
    waits = Waits(log, clock, lambda: still[0])
    assert waits.words == ""
    waits.begin(7, READY)
    clock.now += 1.0
    waits.look(READY)
    still[0] = "the sampler 0 has been stopped for 1 s"
    clock.now += 1.0
    waits.look(READY)
    assert [event["seconds"] for event in told()] == [2.0]
    still[0] = "the sampler 0 has been stopped for 2 s"
    clock.now += 1.0
    waits.look(READY)
    assert waits.words == f"{READY.detail}; {still[0]}"
    waits.end()
    assert [(event["seconds"], event["detail"]) for event in told()] == [
        (2.0, "too few finished groups; the sampler 0 has been stopped for 1 s"),
        (1.0, "too few finished groups; the sampler 0 has been stopped for 2 s"),
    ]
    assert waits.with_processes("the learner") == f"the learner; {still[0]}"
    waits.begin(7, tool())  # of the next wait it is told at once, too
    clock.now += 1.0
    waits.look(tool())
    assert told()[-1]["detail"] == f"{tool().detail}; {still[0]}"
