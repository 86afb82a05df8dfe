"""What the audit proves of a run that died, or was ended, and was resumed."""

import pytest
from test_audit import Log, audit_of, three_steps
from test_audit_retries import retried


def resume(log, version, times=1, **changes):
    run = {name: value for name, value in log.events[0].items() if name not in ("t", "event")}
    log("run", **run | {"version": version, "resumed": times} | changes)


def interrupted(*, ended=True, ready=False, end=False):
    """Two groups of a step: of group 1 a member has ended and the other runs, when the run is cut off."""
    log = Log(steps=1)
    for group in range(2):
        log.admit(group, 0)
    log.rollout(0, 0)
    log.start("1.0", 0), log.sample("1.0", 0, 3)
    log.start("1.1", 0), log.sample("1.1", 0, 4)
    if ended:
        log.finish("1.0")
    if ready:
        log.finish("1.1"), log("ready", group=1)
    if end:
        log.end(status="stopped", steps=0, admitted=2, outstanding=2)
    return log


def finish(log, *names):
    for name in names:
        log.start(name, 0), log.sample(name, 0, 5), log.finish(name)
    log("ready", group=1)
    log.train(1, 0, [0, 1], [0])
    log.end(steps=1, admitted=2, consumed=2)


@pytest.mark.parametrize("end", [True, False])
def test_trajectories_that_ended_or_ran_start_again_after_a_resume(end):
    log = interrupted(end=end)
    resume(log, 0)
    log("retry", **retried("1.0", 1, 3))
    log("retry", **retried("1.1", 1, 4))
    finish(log, "1.0", "1.1")
    result = audit_of(log.events)
    assert result.findings == [] and result.fates["retry"] == 7


def test_trajectories_that_were_saved_go_on_after_a_resume():
    log = interrupted()
    resume(log, 0)
    log.sample("1.1", 0, 2), log.finish("1.1")
    finish(log)
    assert log.findings() == []


def test_an_ended_trajectory_starts_again_only_if_an_earlier_run_lost_it():
    log = interrupted()
    log("retry", **retried("1.0", 1, 3))
    assert any("retry of trajectory 1.0, which is ended" in finding for finding in log.findings())
    log = interrupted(ended=False)
    resume(log, 0)
    log.finish("1.0")
    log("retry", **retried("1.0", 1, 3))
    assert any("retry of trajectory 1.0, which is ended" in finding for finding in log.findings())


def test_a_trajectory_that_was_ready_never_starts_again():
    log = interrupted(ready=True)
    resume(log, 0)
    log("retry", **retried("1.0", 1, 3))
    assert any("retry of trajectory 1.0, which is ended" in finding for finding in log.findings())


def test_only_members_that_were_handed_over_train():
    log = Log(stale_policy="keep", on_stragglers="carry_over", steps=1)
    log.admit(0, 0)
    for name in ("0.0", "0.1"):
        log.start(name, 0), log.sample(name, 0, 2)
    log.finish("0.0"), log("ready", group=0), log.finish("0.1")
    log.train(1, 0, [0], [0], members=[[0, 1]], tokens=4)
    log.end(steps=1, admitted=1, consumed=1)
    assert any("group 0 has members that are not ready" in finding for finding in log.findings())


@pytest.mark.parametrize("told", ["batch", "optim"])
def test_an_update_that_was_cut_off_is_told_to_its_end_after_the_resume(told):
    log = three_steps()
    cut = next(i for i, event in enumerate(log.events) if event["event"] == told) + 1
    again = log.events[0] | {"t": log.events[cut - 1]["t"], "version": 0, "resumed": 1}
    events = [*log.events[:cut], again, *log.events[cut:]]
    assert audit_of(events).findings == []
    missing = [*events[: cut + 1], *events[cut + (3 if told == "batch" else 2) :]]
    assert any("due is" in finding for finding in audit_of(missing).findings)


def test_nothing_but_a_resume_follows_the_end():
    log = three_steps()
    log.admit(7, 2)
    assert any("admitted does not belong here" in finding for finding in log.findings())


@pytest.mark.parametrize(("times", "wrong"), [((1, 2), False), ((1, 1), True), ((2,), True), ((0,), True)])
def test_resumes_are_counted(times, wrong):
    log = interrupted()
    for number in times:
        resume(log, 0, number)
    log("retry", **retried("1.0", 1, 3))
    log("retry", **retried("1.1", 1, 4))
    finish(log, "1.0", "1.1")
    assert any("no resume of what came before" in finding for finding in log.findings()) == wrong


def test_more_steps_may_be_asked_for_in_a_resume():
    log = three_steps()
    resume(log, 2, steps=4)
    log.admit(7, 2), log.admit(8, 2)
    log.rollout(7, 2), log.rollout(8, 2)
    log.train(4, 2, [7, 8], [0])
    log.end(steps=4, admitted=9, consumed=8, failed=1)
    assert log.findings() == []
