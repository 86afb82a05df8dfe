"""A log that a death cut off is completed from the journal, and the resumed run's log then passes the audit."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import MODES, Died, SimulatedRun

from pipeline.audit import Audit
from pipeline.errors import JournalError
from pipeline.journal.complete_log import complete_log
from pipeline.journal.journal_files import Journal
from pipeline.journal.records import Admitted, BatchRecord, GivenUp, Ready
from pipeline.run_dir.json_lines import read_lines
from pipeline.trajectory import Group, Span, Trajectory


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch):
    """Nothing here is cut off by the machine, so nothing has to be on the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def played(tmp_path_factory, seed, mode, power):
    run_dir = tmp_path_factory.mktemp("run")
    run = SimulatedRun(run_dir, seed, mode, power)
    run.play(lives=4)
    with open(run_dir / "events.jsonl", encoding="utf-8") as lines:
        audit = Audit(lines)
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (audit.findings, steps) == ([], list(range(1, run.steps + 1)))
    assert 1 <= audit.runs <= run.num_deaths + 1  # a run may die before its first event is on the disk
    shutil.rmtree(run_dir)
    return run


def begun(run_dir, seed=9, mode="wait"):
    """A run that has been killed after at least one update; what the log says by then."""
    run = SimulatedRun(run_dir, seed, mode)
    with pytest.raises(Died):
        run._live(150)
    run.files.flush()
    assert any(event["event"] == "published" for event in events_of(run_dir))
    return run


def events_of(run_dir):
    return [event for _, event in read_lines(run_dir / "events.jsonl")]


def without_time(events):
    return [{name: value for name, value in event.items() if name != "t"} for event in events]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_killed_at_any_write(tmp_path_factory, mode, seed):
    played(tmp_path_factory, seed, mode, power=False)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_cut_off_by_a_power_failure(tmp_path_factory, mode, seed):
    played(tmp_path_factory, seed, mode, power=True)


def test_a_log_that_lacks_nothing_stays_as_it_is(tmp_path):
    run = begun(tmp_path)
    complete_log(tmp_path, 0)
    before = (tmp_path / "events.jsonl").read_bytes()
    state = complete_log(tmp_path, 0)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    assert (state.num_runs, state.status, state.admitted) == (1, None, run.recorder.state.admitted)
    assert state.seconds == events_of(tmp_path)[-1]["t"]


def test_completing_twice_changes_nothing_more(tmp_path):
    run = begun(tmp_path)
    run.files.journal.append(Admitted(run.recorder.state.admitted, 3, 0, "its-id"))
    complete_log(tmp_path, 0)
    events = events_of(tmp_path)
    assert without_time(events[-1:]) == [
        {"event": "admitted", "group": run.recorder.state.admitted, "row": 3, "version": 0, "id": "its-id"}
    ]
    assert events[-1]["t"] == events[-2]["t"]
    complete_log(tmp_path, 0)
    assert events_of(tmp_path) == events


def log_of(run_dir, *events, group_size=1, on_stragglers="truncate"):
    """The start of a log, with a journal that has these groups' admissions and nothing else."""
    run = {"event": "run", "version": 0, "group_size": group_size, "on_stragglers": on_stragglers}
    (run_dir / "events.jsonl").write_text("".join(json.dumps({"t": 1.5} | event) + "\n" for event in [run, *events]))
    journal = Journal(run_dir)
    journal.begin()
    for event in events:
        if event["event"] == "admitted":
            journal.append(Admitted(event["group"], event["row"], event["version"]))
    return journal


ADMITTED = {"event": "admitted", "group": 0, "row": 4, "version": 0}
STARTED = {"event": "started", "trajectory": "0.0", "group": 0, "version": 0, "sampler": 0}
SEGMENT = {"event": "segment", "trajectory": "0.0", "group": 0, "version": 0, "kv_version": 0, "tokens": 2}
SEGMENT |= {"cached": 0, "sampler": 0, "seconds": 0.5}
ENDED = {"event": "trajectory", "trajectory": "0.0", "group": 0, "tokens": 5, "reward": 0.25, "truncated": "turns"}
BATCH = BatchRecord(1, 0, (0,), None, True, 0.1, 1.0, (), 5, 0, 0, 0, 0)


def sampled(*lengths, version=0):
    spans = [Span("prompt", [1])] + [Span("generated", [2] * n, version, version, [-0.5] * n) for n in lengths]
    return Trajectory(0, 0, 4, spans, 0.25, "turns")


def test_what_a_power_failure_took_of_a_trajectory_is_told_again(tmp_path):
    journal = log_of(tmp_path, ADMITTED, STARTED, SEGMENT)
    journal.append(Ready(Group(0, 4, 0, [sampled(2, 3)])))
    complete_log(tmp_path, 0)
    unknown = {"tokens": 3, "cached": None, "sampler": None, "seconds": None}
    assert without_time(events_of(tmp_path)[4:]) == [SEGMENT | unknown, ENDED, {"event": "ready", "group": 0}]


@pytest.mark.parametrize("told", [SEGMENT, SEGMENT | {"tokens": 4}])
def test_a_trajectory_whose_new_start_was_lost_starts_again_in_the_log(tmp_path, told):
    """The log has segments of an attempt that came to nothing, under the same version or an older one."""
    version = int(told is SEGMENT)
    journal = log_of(tmp_path, ADMITTED, STARTED, told, {"event": "published", "version": 1})
    journal.append(Ready(Group(0, 4, 0, [sampled(2, 3, version=version)])))
    complete_log(tmp_path, 0)
    events = events_of(tmp_path)[5:]
    assert [event["event"] for event in events] == ["retry", "started", "segment", "segment", "trajectory", "ready"]
    assert (events[0]["attempt"], events[0]["tokens"]) == (1, told["tokens"])
    assert [event["version"] for event in events[1:4]] == [None, version, version]


@pytest.mark.parametrize(("num_steps", "due"), [(1, ""), (0, "optim")])
def test_the_update_of_a_step_that_is_complete_is_told(tmp_path, num_steps, due):
    journal = log_of(tmp_path, ADMITTED, STARTED, SEGMENT | {"tokens": 5}, ENDED)
    journal.append(Ready(Group(0, 4, 0, [sampled(5)])))
    journal.append(BATCH)
    state = complete_log(tmp_path, num_steps)
    assert (state.batches, state.version, state.due) == (1, num_steps, due)
    events = events_of(tmp_path)[5:]
    assert [event["event"] for event in events] == ["ready", "batch", *["optim", "published"] * num_steps]
    own = {"step": 1, "version": 0, "groups": [0], "tokens": 5, "masked": 0, "dropped": 0, "age_min": 0, "age_max": 0}
    assert without_time(events[1:2]) == [{"event": "batch", "updated": True} | own]


def test_an_admission_at_a_version_proves_that_it_was_published(tmp_path):
    journal = log_of(tmp_path, ADMITTED, STARTED, SEGMENT | {"tokens": 5}, ENDED)
    for record in (Ready(Group(0, 4, 0, [sampled(5)])), BATCH, Admitted(1, 5, 1)):
        journal.append(record)
    complete_log(tmp_path, 0)
    kinds = [event["event"] for event in events_of(tmp_path)[5:]]
    assert kinds == ["ready", "batch", "optim", "published", "admitted"]


def test_stragglers_that_were_discarded_are_told(tmp_path):
    journal = log_of(tmp_path, ADMITTED, STARTED, SEGMENT, group_size=3, on_stragglers="discard")
    one = sampled(1)
    one.member = 2
    journal.append(Ready(Group(0, 4, 0, [one], final=False)))
    journal.append(Ready(Group(0, 4, 0, [], final=True)))
    state = complete_log(tmp_path, 0)
    discarded = [event for event in events_of(tmp_path) if event["event"] == "discarded"]
    assert [(event["trajectory"], event["tokens"]) for event in discarded] == [("0.0", 2), ("0.1", 0)]
    assert state.member(0, 2).state == "ready"


@pytest.mark.parametrize("event", ["failed", "filtered"])
def test_a_group_that_was_given_up_is_told_with_the_tokens_that_the_log_has(tmp_path, event):
    journal = log_of(tmp_path, ADMITTED, STARTED, SEGMENT)
    journal.append(GivenUp(event, 0, "its cause", 9))
    assert complete_log(tmp_path, 0).groups == {}
    events = events_of(tmp_path)[4:]
    assert [one["event"] for one in events] == [*["trajectory", "ready"] * (event == "filtered"), event]
    assert (events[-1]["cause"], events[-1]["tokens"]) == ("its cause", 2)


def test_a_log_that_knows_more_than_the_journal_is_cut_there(tmp_path):
    log_of(tmp_path, ADMITTED, STARTED).close()
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(json.dumps({"t": 2, "event": "wait"}) + "\n")
        file.write(json.dumps({"t": 3} | ADMITTED | {"group": 1}) + "\n" + json.dumps({"t": 4} | SEGMENT) + "\n")
    state = complete_log(tmp_path, 0)
    assert [event["event"] for event in events_of(tmp_path)] == ["run", "admitted", "started", "wait"]
    assert (state.seconds, state.member(0, 0).state) == (2, "running")


def test_an_update_that_the_journal_does_not_know_is_no_torn_end(tmp_path):
    log_of(tmp_path, ADMITTED, STARTED, SEGMENT)
    with open(tmp_path / "events.jsonl", "a") as file:
        for event in ({"event": "ready", "group": 0}, {"event": "batch", "step": 1}, {"event": "optim"}):
            file.write(json.dumps({"t": 3} | event) + "\n")
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(JournalError, match="tells at byte .* of an update that the journal knows nothing of"):
        complete_log(tmp_path, 0)
    assert (tmp_path / "events.jsonl").read_bytes() == before


def test_a_log_and_a_journal_of_different_runs_are_refused(tmp_path):
    journal = log_of(tmp_path, ADMITTED, ADMITTED | {"group": 1})
    journal.append(GivenUp("failed", 0, "cause", 0))
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(json.dumps({"t": 3, "event": "failed", "group": 1, "cause": "cause", "tokens": 0}) + "\n")
    with pytest.raises(JournalError, match="the log tells failed 1, and the journal failed 0"):
        complete_log(tmp_path, 0)


def test_a_log_that_lost_more_than_the_journal_reaches_back_to_is_refused(tmp_path):
    journal = log_of(tmp_path, ADMITTED)
    journal.begin()
    journal.remove_before(1)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(JournalError, match="tells of 0 decisions, and .* journal begins with number 2"):
        complete_log(tmp_path, 0)


def test_an_event_that_cant_be_is_named_with_its_place(tmp_path):
    log_of(tmp_path, ADMITTED, SEGMENT | {"group": 7})
    with pytest.raises(JournalError, match=r"an event at byte \d+ that can't follow .*KeyError: 7"):
        complete_log(tmp_path, 0)


def test_a_run_that_died_before_its_journal_began_has_an_empty_state(tmp_path):
    assert complete_log(tmp_path, 0).num_runs == 0
