"""The audit accepts a log that keeps its promises and finds every mutation of it that breaks one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipeline import audit
from pipeline.audit import Audit
from pipeline.run_dir.events import FIELDS, OPTIONAL

# What the log tells but nothing else in it can confirm.
TOLD_ONCE = {"t", "row", "sampler", "kv_version", "cached", "seconds", "reward", "slot", "bytes", "steps", "masked"}
TOLD_ONCE |= {"dropped", "concurrency", "admit_ahead", "oversample_factor", "attempt"}
UNPROVED = {"tool", "wait", "restart", "evaluation", "checkpoint"}


class Log:
    """A hand-made run: two groups a step, two members a group, one version of staleness."""

    def __init__(self, **run):
        self.events, self.tokens = [], {}
        values = {"mode": "async", "max_staleness": 1, "stale_policy": "wait", "on_stragglers": "truncate"}
        values |= {"groups_per_step": 2, "group_size": 2, "admit_ahead": 2, "oversample_factor": 1.0}
        self("run", **values | {"concurrency": 8, "steps": 3, "version": 0} | run)

    def __call__(self, event, **fields):
        assert set(FIELDS[event].split()) <= fields.keys() <= {*FIELDS[event].split(), *OPTIONAL.get(event, "").split()}
        self.events.append({"t": len(self.events) / 10, "event": event} | fields)

    def admit(self, group, version):
        self("admitted", group=group, row=group, version=version)

    def start(self, name, version):
        group = int(name.split(".")[0])
        self("started", trajectory=name, group=group, version=version, sampler=0)
        self.tokens[name] = 0

    def sample(self, name, version, tokens):
        group, times = int(name.split(".")[0]), {"sampler": 0, "seconds": 0.1}
        self(
            "segment",
            trajectory=name,
            group=group,
            version=version,
            kv_version=version,
            tokens=tokens,
            cached=0,
            **times,
        )
        self.tokens[name] += tokens

    def finish(self, name):
        group = int(name.split(".")[0])
        self("trajectory", trajectory=name, group=group, tokens=self.tokens[name], reward=1.0, truncated=None)

    def rollout(self, group, version, tokens=(3, 4)):
        for member, count in enumerate(tokens):
            name = f"{group}.{member}"
            self.start(name, version)
            self.sample(name, version, count)
            self("tool", trajectory=name, group=group, name="guess", seconds=0.1, error=None)
            self.sample(name, version, 1)
            self.finish(name)
        self("ready", group=group)

    def train(self, step, version, groups, ages, updated=True, **more):
        tokens = sum(count for name, count in self.tokens.items() if int(name.split(".")[0]) in groups)
        span = {"age_min": min(ages), "age_max": max(ages), "updated": updated}
        values = {"step": step, "version": version, "groups": groups, "tokens": tokens, "masked": 0, "dropped": 0}
        self("batch", **values | span | more)
        if updated:
            self("optim", step=step, **{"from": version, "to": version + 1}, seconds=0.1)
            self("published", version=version + 1, slot=0, bytes=8, seconds=0.1)

    def end(self, **counts):
        values = {
            "status": "completed",
            "steps": 3,
            "admitted": 0,
            "consumed": 0,
            "filtered": 0,
            "failed": 0,
            "outstanding": 0,
        }
        self("end", **values | counts)

    def findings(self):
        return audit_of(self.events).findings


def audit_of(events):
    return Audit(json.dumps(event) for event in events)


@pytest.fixture
def log():
    return three_steps()


def three_steps():
    """Three steps, the second without an update; one retry, one failed group, one group outstanding at the end."""
    log = Log()
    for group in range(4):
        log.admit(group, 0)
    log.rollout(0, 0)
    log.rollout(1, 0)
    log("wait", step=1, seconds=0.5, group=1, trajectory="1.0", why="ready", detail="")
    log.train(1, 0, [0, 1], [0])
    log.admit(4, 1)
    log.admit(5, 1)
    log.start("2.0", 0)
    log.sample("2.0", 0, 5)
    log("retry", group=2, trajectory="2.0", attempt=1, cause="died", tokens=5)
    log.rollout(2, 0)
    log.rollout(3, 1)
    log("restart", worker="sampler-0", pid=9, cause="SIGKILL")
    log.train(2, 1, [2, 3], [0, 1], updated=False)
    log.start("4.0", 1)
    log.sample("4.0", 1, 2)
    log("failed", group=4, cause="raised", tokens=2)
    del log.tokens["4.0"]
    log.admit(6, 1)
    log.rollout(6, 1)
    log.rollout(5, 1, (9, 2))
    log.train(3, 1, [5, 6], [0])
    log.end(admitted=7, consumed=6, failed=1)
    return log


def test_a_run_that_keeps_its_promises_passes(log):
    result = audit_of(log.events)
    assert result.findings == []
    assert (result.batches, result.version, result.oldest) == (3, 2, 1)
    trained = sum(log.tokens.values())
    assert result.generated == trained + 5 + 2
    assert result.fates == {"consumed": trained, "retry": 5, "failed": 2, "outstanding": 0}


def test_dropping_any_line_is_found(log):
    for index, event in enumerate(log.events):
        rest = log.events[:index] + log.events[index + 1 :]
        if event["event"] in UNPROVED:
            assert audit_of(rest).findings == []
        else:
            assert audit_of(rest).findings, f"without line {index + 1}: {event}"


def test_doubling_any_line_is_found(log):
    for index, event in enumerate(log.events):
        if event["event"] not in UNPROVED:
            twice = log.events[: index + 1] + log.events[index:]
            assert audit_of(twice).findings, f"line {index + 1} twice: {event}"


@pytest.mark.parametrize("change", [-1, 1])
def test_changing_any_number_is_found(log, change):
    changed = Counter()
    for index, event in enumerate(log.events):
        for name, value in event.items():
            if event["event"] in UNPROVED or name in TOLD_ONCE or isinstance(value, bool) or not isinstance(value, int):
                continue
            if event["event"] == "run" and (name, change) in (("max_staleness", 1), ("groups_per_step", 1)):
                continue  # a weaker promise, which the run kept too
            mutated = [*log.events[:index], event | {name: value + change}, *log.events[index + 1 :]]
            assert audit_of(mutated).findings, f"line {index + 1} with {name} {value + change}: {event}"
            changed[event["event"], name] += 1
    assert changed["batch", "age_max"] == 3 and changed["segment", "version"] > 20


def test_swapping_neighbours_of_an_update_is_found(log):
    for index in range(len(log.events) - 1):
        one, two = log.events[index : index + 2]
        if {one["event"], two["event"]} <= {"batch", "optim", "published", "admitted"}:
            swapped = [*log.events[:index], two | {"t": one["t"]}, one | {"t": two["t"]}, *log.events[index + 2 :]]
            assert audit_of(swapped).findings, f"{two['event']} before {one['event']}"


def test_time_that_goes_back_is_found(log):
    log.events[5]["t"] = 0.0
    assert log.findings() == ["line 6: t goes back from 0.4 to 0.0"]


def test_a_finding_names_the_line_and_the_values(log):
    index = next(i for i, event in enumerate(log.events) if event["event"] == "trajectory")
    log.events[index]["tokens"] += 7
    assert log.findings() == [f"line {index + 1}: 0.0 tells 11 tokens, not 4"]


@pytest.mark.parametrize(
    "line", ["", "{", "3", "[]", "null", '{"t": 1}', '{"t": 0, "event": "batch"}', '{"t":"x","event":"end"}']
)
def test_a_malformed_line_is_one_finding_with_its_number(log, line):
    lines = [json.dumps(event) for event in log.events]
    findings = Audit([*lines[:4], line, *lines[4:]]).findings
    assert findings and all(finding.startswith("line 5: ") for finding in findings)


def test_a_run_that_was_killed_did_not_end_in_order(log):
    assert audit_of(log.events[:-1]).findings == [
        f"line {len(log.events) - 1}: the last event is not end: the run did not end in order"
    ]


def test_an_empty_log_is_found():
    assert Audit([]).findings


def test_a_segment_older_than_the_bound_is_found():
    log = Log(max_staleness=0, steps=2)
    log.admit(0, 0)
    log.admit(1, 0)
    log.rollout(0, 0)
    log.rollout(1, 0)
    log.train(1, 0, [0, 1], [0])
    log.admit(2, 1)
    log.admit(3, 1)
    log.rollout(2, 1)
    log.rollout(3, 0)
    log.train(2, 1, [2, 3], [0, 1])
    log.end(steps=2, admitted=4, consumed=4)
    assert any("9 tokens are older than max_staleness 0" in text for text in log.findings())


def test_a_step_that_leaves_too_many_reservations_is_found():
    """Three groups admitted at version 0 are left with two places in the last update that may train them."""
    log = Log(admit_ahead=1, steps=3)
    for group in range(4):
        log.admit(group, 0)
    for group in (0, 1):
        log.rollout(group, 0)
    log.train(1, 0, [0], [0])
    assert any("reservation 3 (version 0) has only 2 places" in text for text in log.findings())


def test_more_admitted_than_allowed_is_found():
    log = Log()
    for group in range(5):
        log.admit(group, 0)
    assert any("5 groups are admitted, 4 are allowed after 0 batches" in text for text in log.findings())


@pytest.mark.parametrize("given_up", [True, False])
def test_while_a_batch_trains_a_group_is_admitted_only_in_the_place_of_another(given_up):
    log = Log(steps=9)
    for group in range(4):
        log.admit(group, 0)
    for group in range(3):
        log.rollout(group, 0)
    log.train(1, 0, [0, 1], [0])
    update = [log.events.pop(), log.events.pop()]
    if given_up:
        log("filtered", group=2, cause="zero_variance", tokens=9)
    log.admit(4, 0)
    log.events += reversed(update)
    log.end(status="stopped", steps=1, admitted=5, consumed=2, filtered=int(given_up), outstanding=3 - given_up)
    for t, event in enumerate(log.events):
        event["t"] = t
    findings = log.findings()
    assert (findings == []) == given_up, findings
    assert given_up or "5 groups are admitted, 4 are allowed after 0 batches" in findings[0]


def test_masked_spans_may_be_older_only_if_masked():
    for masked, broken in ((4, False), (3, True)):
        log = Log(max_staleness=0, stale_policy="mask_span", steps=2)
        log.admit(0, 0)
        log.admit(1, 0)
        log.rollout(0, 0)
        log.rollout(1, 0)
        log.train(1, 0, [0, 1], [0])
        log.admit(2, 1)
        log.admit(3, 1)
        log.rollout(2, 1)
        log.start("3.0", None)
        log.sample("3.0", 1, 2)
        log.finish("3.0")
        log.start("3.1", None)
        log.sample("3.1", 1, 2)
        log.finish("3.1")
        log("ready", group=3)
        log.train(2, 1, [2], [0])
        log.train(3, 2, [3], [1], masked=masked)
        log.end(admitted=4, consumed=4)
        assert any("older than max_staleness" in text for text in log.findings()) == broken


def test_portions_are_consumed_by_member():
    log = Log(stale_policy="keep", on_stragglers="carry_over", steps=1)
    log.admit(0, 0)
    for member in (0, 1):
        log.start(f"0.{member}", 0)
        log.sample(f"0.{member}", 0, 2 + member)
    log.finish("0.0")
    log("ready", group=0)
    log.train(1, 0, [0], [0], members=[[0]], tokens=2)
    log.finish("0.1")
    log("ready", group=0)
    log.train(2, 1, [0], [1], members=[[1]], tokens=3)
    log.end(steps=2, admitted=1, consumed=1)
    assert log.findings() == []


def closed_log(stragglers, late, **run):
    """A group of three, two of which end: the third is discarded after the batch (`late`), or before it."""
    log = Log(on_stragglers=stragglers, steps=1, groups_per_step=1, group_size=3, **run)
    log.admit(0, 0)
    for name in ("0.0", "0.1"):
        log.start(name, 0), log.sample(name, 0, 3), log.finish(name)
    if late:
        log.start("0.2", 0), log.sample("0.2", 0, 4)
        log("ready", group=0)
        log.train(1, 0, [0], [0], members=[[0, 1]], tokens=6)
        log.sample("0.2", 0, 1)  # the request that was not interrupted
    log("discarded", trajectory="0.2", group=0, cause="group_deadline", tokens=5 if late else 0)
    if not late:  # it had not started
        log("ready", group=0)
        log.train(1, 0, [0], [0])
    return log


def test_discarded_members_may_end_after_their_groups_batch():
    log = closed_log("discard", True, stale_policy="mask_span")
    log.end(steps=1, admitted=1, consumed=1)
    assert log.findings() == []


def test_a_group_whose_discarded_member_still_runs_is_outstanding():
    log = closed_log("discard", True, stale_policy="mask_span")
    log.events.pop()
    log.end(steps=1, admitted=1, outstanding=1)
    assert log.findings() == []


def test_a_member_that_never_started_may_be_discarded():
    log = closed_log("truncate", False)
    log.end(steps=1, admitted=1, consumed=1)
    assert log.findings() == []


def test_a_group_without_a_word_of_one_member_is_not_ready():
    log = closed_log("truncate", False)
    log.events = [event for event in log.events if event["event"] != "discarded"]
    log.end(steps=1, admitted=1, consumed=1)
    assert any("ready twice or too early" in finding for finding in log.findings())


def test_a_resume_goes_on_where_the_log_ended(log):
    cut = next(i for i, event in enumerate(log.events) if event["event"] == "published") + 1
    again = log.events[0] | {"t": log.events[cut]["t"], "version": 1, "resumed": 1}
    events = [*log.events[:cut], again, *log.events[cut:]]
    assert audit_of(events).findings == []
    assert audit_of([*events[:cut], again | {"version": 0}, *events[cut + 1 :]]).findings
    assert audit_of([*events[:cut], again | {"max_staleness": 9}, *events[cut + 1 :]]).findings


def test_it_stands_alone_and_prints_a_report(log, tmp_path):
    """Copied elsewhere and run by itself it needs none of our files."""
    script, events = tmp_path / "alone.py", tmp_path / "events.jsonl"
    script.write_text(Path(audit.__file__).read_text())
    for mutate, code in ((False, 0), (True, 1)):
        if mutate:
            log.events[1]["version"] = 1
        events.write_text("".join(json.dumps(event) + "\n" for event in log.events))
        done = subprocess.run(
            [sys.executable, "-I", script, events], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert ("0 findings" in done.stdout) == (code == 0)
    assert len(Path(audit.__file__).read_text().splitlines()) < 150
