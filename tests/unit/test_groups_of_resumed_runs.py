"""A group goes on as an earlier run's log and journal left it: nothing is told, sampled or handed out twice."""

import time

import pytest

from pipeline.config import GroupCompletion
from pipeline.errors import HopelessError, TrajectoryError
from pipeline.journal.log_state import LogState
from pipeline.journal.run_state import Outstanding, RunState
from pipeline.rollouts.kept_members import KeptMembers, RunningMember
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.running_group import GroupFailed, RunningGroup
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.run_dir.events import EventLog
from pipeline.schedule import Admission
from pipeline.training.resumption import Resumption
from pipeline.trajectory import Span, Trajectory

DEADLINE = {"mode": "deadline", "max_straggler_tokens": 4, "min_members": 1}


class Log:
    def __init__(self):
        self.told = []

    def discarded(self, trajectory, cause):
        self.told.append((trajectory.member, cause))

    def retry(self, trajectory, attempt, cause, *, failures):
        self.told.append((trajectory.member, attempt, trajectory.generated_tokens))

    def failure(self, error):
        self.told.append(str(error))


def resumed(on_stragglers, **kept):
    """(the group, what its log is told, what it hands out)."""
    log, given = Log(), []
    completion = GroupCompletion(on_stragglers=on_stragglers, **DEADLINE)
    group = RunningGroup(Admission(7, 2, 1), {}, 3, completion, log, given.append)
    group.resume(KeptMembers(**kept))
    return group, log.told, given


def test_a_part_that_all_was_discarded_of_ends_the_group_at_once():
    group, told, given = resumed("discard", handed_over={0}, discarded={1, 2})
    assert (told, group.done) == ([], True)
    assert [(result.group, result.members, result.final) for result in given] == [(7, [], True)]


def test_those_that_a_closed_group_had_yet_to_discard_are_discarded():
    group, told, given = resumed("discard", handed_over={0}, discarded={1})
    assert (told, [result.final for result in given]) == ([(2, "group_discard")], [True])
    assert not any(group.wants(member) for member in range(3))


def test_what_had_been_discarded_before_its_group_was_ready_is_left_out_of_it():
    group, told, given = resumed("truncate", discarded={2}, ended={0: Trajectory(7, 0, 2)})
    assert (told, given) == ([], []) and [group.wants(member) for member in range(3)] == [False, True, False]
    group, told, given = resumed("truncate", discarded={2}, ended={m: Trajectory(7, m, 2) for m in range(2)})
    assert (told, [result.members for result in given]) == ([], [[0, 1]])


def test_stragglers_that_are_carried_over_go_on():
    group, told, given = resumed("carry_over", handed_over={0})
    assert (told, given) == ([], []) and [group.wants(member) for member in range(3)] == [False, True, True]


class Loop:
    """Of a member that runs."""

    def __init__(self, trajectory):
        self.trajectory = trajectory
        self.stopped_by = None

    def stop(self, cause, *, discard):
        self.stopped_by = cause


def generated(member, tokens):
    return Trajectory(7, member, 2, [Span("generated", [1] * tokens, 0, 0, [0.0] * tokens)])


def test_the_tokens_of_the_earlier_run_stay_accounted_for_and_attempts_count_on():
    log, given = Log(), []
    group = RunningGroup(Admission(7, 2, 1), {}, 3, GroupCompletion(mode="wait"), log, given.append)
    ended, running, fresh = generated(0, 4), generated(1, 3), generated(2, 0)
    group.resume(KeptMembers(ended={0: ended}, running={1: RunningMember(running, 0, {})}, attempts={1: 2, 2: 0}))
    group.add(1, Loop(running))
    group.add(2, Loop(fresh))
    group.starts_again(1, Loop(generated(1, 0)), "its process died", has_failed=False)
    assert log.told == [(1, 3, 3)], "the third time, and three tokens thrown away"
    group.failed(2, TrajectoryError("It broke."))
    assert given == [], "member 1 may be in a request"
    group.finished(1)
    assert given == [GroupFailed(7, "It broke.", 4)]


def test_failures_count_on():
    log = Log()
    group = RunningGroup(Admission(7, 2, 1), {}, 3, GroupCompletion(mode="wait"), log, None)
    group.resume(KeptMembers(failures={1: 1}))
    group.count_failure(1, TrajectoryError("It broke."), max_retries=2)
    group.count_failure(0, TrajectoryError("It broke."), max_retries=2)
    with pytest.raises(HopelessError, match=r"It broke, at its attempt 3 \(max_retries = 2\)"):
        group.count_failure(1, TrajectoryError("It broke."), max_retries=2)


def test_a_failure_is_in_the_file_at_once(tmp_path):
    """A resumed run counts on from it, though the next event may never come."""
    events = EventLog(tmp_path / "events.jsonl", time.monotonic)
    RolloutLog(events, SamplingCounters()).retry(generated(1, 3), 1, "It broke.", failures=1)
    assert '"failures": 1' in (tmp_path / "events.jsonl").read_text()
    events.close()


@pytest.fixture
def resumption():
    """Of group 0 a member has been trained, one ended, one ran; of group 1 all was discarded that was not trained."""
    log = LogState()
    events = [{"event": "run", "version": 0, "group_size": 3, "on_stragglers": "discard"}]
    events += [{"event": "admitted", "group": group, "row": group, "version": 0} for group in (0, 1)]
    told = [("started", 0), ("trajectory", 0), ("ready", None), ("batch", None)]
    for group in (0, 1):
        for event, member in told:
            one = {"event": event, "group": group, "trajectory": f"{group}.{member}", "version": 0}
            one |= {"step": 1, "groups": [group], "members": [[0]], "updated": False}
            events.append(one)
    own = {"group": 0, "trajectory": "0.1", "version": 0, "kv_version": 0, "tokens": 5, "attempt": 2}
    events += [{"event": event} | own for event in ("retry", "started", "segment")]
    own = {"cause": "group_discard", "tokens": 0}
    events += [{"event": "discarded", "group": 1, "trajectory": f"1.{member}"} | own for member in (1, 2)]
    for event in events:
        log.apply({"t": 0} | event)
    outstanding = {group: Outstanding(group, 0, {0}) for group in (0, 1)}
    resumption = Resumption(state=RunState(outstanding=outstanding), log=log)
    resumption.keep({})
    return resumption


def test_what_had_begun_starts_again_and_what_was_discarded_does_not(resumption):
    assert [(event["trajectory"], event["attempt"], event["tokens"]) for event in resumption.started_again()] == [
        ("0.1", 3, 5)
    ]
    kept = resumption.kept
    assert kept[0].attempts == {1: 3, 2: 0} and kept[0].discarded == set()
    assert (kept[1].handed_over, kept[1].discarded) == ({0}, {1, 2})


@pytest.mark.parametrize(("attempts", "goes_on"), [({1: 2}, True), ({1: 1}, False), ({}, False)])
def test_what_is_kept_of_another_attempt_is_not_what_the_log_tells(resumption, attempts, goes_on):
    """Its segments may be as long, and its tokens and reward others."""
    running = RunningMember(Trajectory(0, 1, 0, [Span("generated", [1] * 5, 0, 0, [0.0] * 5)]), 0, {})
    resumption.keep({0: KeptMembers(running={1: running}, attempts=attempts)})
    assert (set(resumption.kept[0].running) == {1}) == goes_on
