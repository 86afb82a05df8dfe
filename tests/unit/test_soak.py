"""The soak's own parts: what it strikes, what its replay finds in a run's files, and what it calls growth."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from bench.soak.__main__ import audit_findings
from bench.soak.errands import write_rows
from bench.soak.memory import MemoryLog
from bench.soak.processes import Seen, Use, role_of
from bench.soak.replay import Replay
from bench.soak.strikes import KILLS, strikes

RUN = {"t": 0.0, "event": "run", "group_size": 2, "max_staleness": 1, "version": 0}


def test_every_tenth_kill_is_the_supervisors():
    kinds = [strike.kind for strike in islice(strikes(3, 5.0), 2000) if strike.kind in KILLS]
    assert len(kinds) > 1000
    assert [n for n, kind in enumerate(kinds, 1) if kind == "kill_supervisor"] == list(range(10, len(kinds) + 1, 10))


def test_strikes_are_those_of_their_seed_and_come_as_often_as_asked():
    first, again, other = (list(islice(strikes(seed, 5.0), 1000)) for seed in (1, 1, 2))
    assert first == again != other
    assert 4.5 < sum(strike.after for strike in first) / 1000 < 5.5
    assert {strike.kind for strike in first} >= {"kill", "segfault", "freeze", "hang", "stop_supervisor"}


def test_every_process_is_hit():
    hit = Counter(strike.victim("abcde") for strike in islice(strikes(0, 1.0), 1000))
    assert min(hit[name] for name in "abcde") > 100
    assert next(strikes(0, 1.0)).victim("") is None


def test_roles_are_told_by_command_lines():
    keeper = ["python", "-I", "-S", "/x/workers/keeper.py", "1", "2", "python", "-P", "-m"]
    assert role_of([*keeper, "workers.worker_main", "pipeline.environments.process"]) == "keeper"
    assert role_of([*keeper, "pipeline.user_code.probe_process"]) == "other"
    assert role_of(["python", "-P", "-m", "workers.worker_main", "workers.learner", "ipc://x"]) == "learner"
    assert role_of(["python", "/x/run.py", "--resume", "y"]) == "supervisor"


def played(rows=4):
    """Events of a run of `rows` rows in batches of one group of two, every third trajectory tried twice; its ledger."""
    events, ledger = [RUN], []
    add = lambda kind, **fields: events.append({"t": float(len(events)), "event": kind, **fields})  # noqa: E731
    for group in range(rows):
        add("admitted", group=group, row=group, id=f"errand-{group}", version=group)
        for member in range(2):
            name = {"trajectory": f"{group}.{member}", "group": group}
            add("started", **name, version=group)
            for _ in range(3):
                add("segment", **name, version=group, tokens=5)
            if (2 * group + member) % 3 == 0:
                add("retry", **name, tokens=15)
                add("started", **name, version=group)
                for _ in range(3):
                    add("segment", **name, version=group, tokens=6)
            tokens = 18 if (2 * group + member) % 3 == 0 else 15
            ledger.append({"row": f"errand-{group}", "member": member, "tokens": tokens, "reward": 0.5})
            add("trajectory", **name, tokens=tokens, reward=0.5)
        add("ready", group=group)
        total = sum(line["tokens"] for line in ledger[-2:])
        add("batch", step=group + 1, version=group, groups=[group], tokens=total, updated=True, age_min=0, age_max=0)
        add("optim", step=group + 1)
        add("published", version=group + 1)
    add("end", status="completed")
    return events, ledger


def metrics_of(events):
    batches = [event for event in events if event["event"] == "batch"]
    told = [{"step": b["step"], "model_step": b["version"] + 1, "train/generated_tokens": b["tokens"]} for b in batches]
    return [line | {"reward/mean": 0.5} for line in told]


def replay(directory, events, ledger, metrics=None, rows=4):
    files = {"events": events, "ledger": ledger, "metrics": metrics_of(events) if metrics is None else metrics}
    for name, lines in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Replay(directory, directory / "ledger.jsonl", rows)


def test_a_run_in_order_has_no_violations(tmp_path):
    found = replay(tmp_path, *played())
    assert found.violations == []
    assert found.counts["rows_trained_once"] == 4 and found.counts["retry"] == 3
    assert found.counts["tokens_generated"] == found.counts["tokens_trained"] + found.counts["tokens_retry"]


def find(events, kind, index=0):
    return [n for n, event in enumerate(events) if event["event"] == kind][index]


def lose_a_row(events, ledger):
    for number in range(len(events)):
        if events[number].get("row") == 3:
            events[number]["row"] = 7


def train_a_row_twice(events, ledger):
    events[find(events, "admitted", 3)]["row"] = 0


def count_a_token_less(events, ledger):
    events[find(events, "batch", 1)]["tokens"] -= 1


def lose_a_segment(events, ledger):
    del events[find(events, "segment", 3)]


def train_what_is_too_old(events, ledger):
    for number in range(find(events, "published", 0), len(events)):
        if events[number]["event"] in ("segment", "started") and events[number]["group"] == 3:
            events[number]["version"] = 1


def drop_a_batch(events, ledger):
    number = find(events, "batch", 2)
    del events[number : number + 3]


def lose_a_retry(events, ledger):
    del events[find(events, "retry")]


def never_admit(events, ledger):
    del events[find(events, "admitted", 2)]


def tell_tokens_otherwise(events, ledger):
    """In the event and in the environment's ledger alike."""
    events[find(events, "trajectory", 1)]["tokens"] += 1
    ledger[1]["tokens"] += 1


def make_it_look_younger(events, ledger):
    for number in range(len(events)):
        if events[number]["event"] in ("segment", "started") and events[number]["group"] == 3:
            events[number]["version"] = 2


def reward_otherwise(events, ledger):
    events[find(events, "trajectory", 2)]["reward"] = 0.75


def forget_the_ledger(events, ledger):
    ledger.pop()


def go_back_in_time(events, ledger):
    events[5]["t"] = 1.0


def give_up_a_group(events, ledger):
    events.insert(-1, {"t": 999.0, "event": "failed", "group": 9, "cause": "x", "tokens": 0})


def stop_early(events, ledger):
    events[-1]["status"] = "stopped"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lose_a_row, "rows never trained: [3]"),
        (train_a_row_twice, "rows trained more than once: [0]"),
        (count_a_token_less, "tokens were generated for"),
        (lose_a_segment, "tokens were generated"),
        (train_what_is_too_old, "updates old"),
        (drop_a_batch, "not the next batch"),
        (never_admit, "never told"),
        (tell_tokens_otherwise, "tokens were generated"),
        (make_it_look_younger, "its ages are"),
        (lose_a_retry, "started while it ran"),
        (reward_otherwise, "its environment gave"),
        (forget_the_ledger, "its environment gave"),
        (go_back_in_time, "time goes back"),
        (give_up_a_group, "a group was given up"),
        (stop_early, "the log ends in"),
    ],
)
def test_replay_finds_what_is_wrong(tmp_path, spoil, sentence):
    events, ledger = played()
    spoil(events, ledger)
    assert any(sentence in violation for violation in replay(tmp_path, events, ledger).violations)


def test_replay_compares_the_metrics(tmp_path):
    events, ledger = played()
    lines = metrics_of(events)
    spoiled = [[lines[0] | {key: 1}, *lines[1:]] for key in ("train/generated_tokens", "reward/mean")]
    for wrong in (lines[:-1], [*lines[:2], *lines[1:]], *spoiled):
        assert any("metrics.jsonl" in one for one in replay(tmp_path, events, ledger, wrong).violations)


def test_an_audit_that_breaks_down_is_a_finding(tmp_path):
    (findings,) = audit_findings(tmp_path)  # there is no log
    assert "ended with 1" in findings and "FileNotFoundError" in findings


def test_an_audit_finds_a_run_in_a_directory_that_is_named_from_here(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert not any("FileNotFoundError" in line for line in audit_findings(Path("run")))


def test_rows_differ_by_their_ids(tmp_path):
    write_rows(str(tmp_path / "rows.jsonl"), 5)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == 5 and all(row["prompt"] for row in rows)


def test_growth_is_of_the_time_after_the_warm_up():
    memory = MemoryLog()
    grows, rests, young = (Seen(pid, float(pid), "sampler") for pid in (1, 2, 3))
    for second in range(100):
        memory.looks[grows].append((float(second), Use(1_000_000 + 2000 * second, 7, 3)))
        memory.looks[rests].append((float(second), Use(10_000 * min(second, 20), 7 + (second > 90), 3)))
    memory.looks[young].append((0.0, Use(1, 1, 1)))
    growth = memory.growth(1000)  # ten units of work a second
    assert growth["sampler-0"] == {"rss_bytes": 200_000.0, "descriptors": 0.0, "threads": 0.0}
    assert growth["sampler-1"] == {"rss_bytes": 0.0, "descriptors": 0.0, "threads": 0.0}
    assert list(growth) == ["sampler-0", "sampler-1"]
    assert memory.most()["sampler"] == {"rss_bytes": 1_198_000, "descriptors": 8, "threads": 3}
