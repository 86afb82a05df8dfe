"""What of an earlier run's unfinished groups is kept: what its log tells, too, and nothing else."""

import pytest

from pipeline.evaluation.evaluator import Evaluator
from pipeline.journal.log_state import LogState
from pipeline.journal.run_state import Outstanding, RunState, TrainingNow
from pipeline.rollouts.kept_members import KeptMembers, RunningMember
from pipeline.training.resumption import Resumption
from pipeline.trajectory import Span, Trajectory

SAVED = Trajectory(0, 0, 0, [Span("prompt", [1]), Span("generated", [2, 3], 5, 5, [-0.5, -0.25])])
STARTED = {"event": "started", "version": 5}
SEGMENT = {"event": "segment", "version": 5, "kv_version": 5, "tokens": 2}
ENDED = {"event": "trajectory"}
RETRY = {"event": "retry", "attempt": 1}
RUN = {"event": "run", "version": 0, "group_size": 1, "on_stragglers": "truncate"}


def kept_of(told, *, first_version=0, version=9, **saved):
    """What a resumed run, at `version`, keeps of `saved` if the log tells this of the only member of the only group."""
    log = LogState()
    log.apply({"t": 0} | RUN)
    log.apply({"t": 0, "event": "admitted", "group": 0, "row": 0, "version": 4})
    for event in told:
        log.apply({"t": 0, "group": 0, "trajectory": "0.0"} | event)
    state = RunState(version=version, outstanding={0: Outstanding(0, 4)})
    resumption = Resumption(state=state, log=log, first_version=first_version)
    resumption.keep({0: KeptMembers(**saved)})
    again = [event["attempt"] for event in resumption.started_again()]
    return resumption.kept[0], again


@pytest.mark.parametrize(
    ("told", "keeps"),
    [
        ([STARTED, SEGMENT], True),
        ([STARTED, SEGMENT | {"tokens": 0}, SEGMENT], True),
        ([STARTED, SEGMENT, RETRY, STARTED, SEGMENT], True),
        ([STARTED], False),
        ([STARTED, SEGMENT, SEGMENT], False),  # it went on after it was saved
        ([STARTED, SEGMENT | {"tokens": 3}], False),
        ([STARTED, SEGMENT | {"version": 6}], False),
        ([STARTED, SEGMENT | {"kv_version": 4}], False),
        ([STARTED | {"version": 6}, SEGMENT], False),  # it was pinned to another version then
        ([STARTED | {"version": None}, SEGMENT], False),
        ([STARTED, SEGMENT, ENDED], False),
        ([STARTED, SEGMENT, RETRY], False),
    ],
)
def test_one_under_way_goes_on_only_if_the_log_tells_the_same_of_it(told, keeps):
    running = {0: RunningMember(SAVED, 5, {})}
    attempt = sum(event["event"] == "retry" for event in told)
    kept, again = kept_of(told, running=running, attempts={0: attempt})
    is_begun = told[-1] != RETRY
    assert kept.running == (running if keeps else {}) and not kept.ended
    assert again == ([attempt + 1] if is_begun and not keeps else [])
    assert kept.attempts == {0: attempt + (is_begun and not keeps)}


@pytest.mark.parametrize(
    ("versions", "keeps"),
    [
        ({"first_version": 5}, True),
        ({"first_version": 6}, False),
        ({"version": 5}, True),
        ({"version": 4}, False),  # published, and its step is to be taken again: metrics.jsonl had no room for its line
    ],
)
def test_one_goes_on_only_under_a_version_that_can_be_had_again(versions, keeps):
    kept, again = kept_of([STARTED, SEGMENT], **versions, running={0: RunningMember(SAVED, 5, {})})
    assert (0 in kept.running, again) == (keeps, [] if keeps else [1])
    told = [STARTED | {"version": None}, SEGMENT]  # its next segment chooses its own
    kept, again = kept_of(told, **versions, running={0: RunningMember(SAVED, None, {})})
    assert (0 in kept.running, again) == (True, [])


@pytest.mark.parametrize(
    ("told", "keeps"),
    [
        ([STARTED, SEGMENT, ENDED], True),
        ([STARTED, SEGMENT | {"tokens": 1}, ENDED], False),
        ([STARTED, SEGMENT, ENDED, RETRY, STARTED, SEGMENT], False),
    ],
)
def test_one_that_has_ended_is_kept_only_if_the_log_tells_the_same_of_it(told, keeps):
    kept, again = kept_of(told, ended={0: SAVED})
    attempt = sum(event["event"] == "retry" for event in told)
    assert kept.ended == ({0: SAVED} if keeps else {}) and not kept.running
    assert again == ([] if keeps else [attempt + 1])


@pytest.mark.parametrize(
    ("told", "failures"),
    [
        ([RETRY | {"failures": 1}], 1),
        ([RETRY | {"failures": 1}, STARTED, RETRY | {"failures": 2}, STARTED, RETRY], 2),
        ([RETRY], 0),  # its process was lost: nobody's try
        ([RETRY | {"failures": 1}, {"event": "end", "status": "stopped"}], 1),
        ([RETRY | {"failures": 1}, {"event": "end", "status": "failed"}], 0),  # whoever resumes it has seen why
        ([RETRY | {"failures": 1}, {"event": "end", "status": "failed"}, RUN], 0),  # and killed since then
    ],
)
def test_failures_count_on_unless_the_run_had_ended_with_an_error(told, failures):
    kept, _ = kept_of([STARTED, *told])
    assert kept.failures.get(0, 0) == failures


@pytest.mark.parametrize(("steps", "is_complete"), [(2, True), (3, True), (4, False), (5, False)])
def test_a_batch_that_has_begun_is_one_of_the_steps(steps, is_complete):
    """Whoever asks for no more than those before it gets no further update."""
    state = RunState(version=3, batches=3, training=TrainingNow(None, []))
    assert Resumption(state, LogState(), saved_version=3).is_complete(steps, None) == is_complete


@pytest.mark.parametrize(
    ("versions", "found"),
    [({1: 1, 2: 1, 3: 2, 4: 3}, (2, 1)), ({1: 1, 3: 2, 4: 3}, None)],  # the second: metrics.jsonl has lost a line
)
def test_an_evaluation_that_was_cut_off_is_made_of_its_own_version_or_not_at_all(versions, found):
    evaluator = Evaluator([{"number": 1}], every=2)
    resumption = Resumption(RunState(version=3, batches=4), LogState(), versions=versions)
    assert resumption.unfinished_evaluation(evaluator, num_slots=3) == found


@pytest.mark.parametrize(("num_slots", "has_slot"), [(3, True), (2, False)])
def test_an_evaluation_is_made_again_if_there_is_a_slot_beside_those_of_trajectories_that_go_on(num_slots, has_slot):
    """One that failed has given its slot back: under `keep` an update may have it, and old rollouts all the others."""
    kept = {0: KeptMembers(running={0: RunningMember(SAVED, 2, {}), 1: RunningMember(SAVED, None, {})})}
    versions = {1: 1, 2: 1, 3: 2, 4: 3}
    resumption = Resumption(RunState(version=3, batches=4), LogState(), versions=versions, kept=kept)
    found = resumption.unfinished_evaluation(Evaluator([{"number": 1}], every=2), num_slots)
    assert found == ((2, 1) if has_slot else None)
