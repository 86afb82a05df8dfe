"""The ideal of a run and its measures, on hand-made logs; and that no report is made of a log that fails the audit.

The logs hold two batches of one group with two members. Work: 1.5 s and 2 s in group 0, 3 s and 4 s in group 1, and
0.5 s of training for each batch.
"""

import json

import pytest

from bench import async_vs_sync
from bench.arm import evaluator_of
from bench.errors import BenchError
from bench.ideal import ideal, ideal_speed, read_work, steady_speed
from bench.measures import check_audit, measure, read_run

SECONDS = {"0.0": ([1.0], [0.5]), "0.1": ([2.0], []), "1.0": ([3.0], []), "1.1": ([1.0, 1.0], [2.0])}
ENDS = {"0.0": 3.0, "0.1": 3.5, "1.0": 8.0, "1.1": 9.0}
BATCHES = {1: (0, 3.5, 4.0), 2: (1, 9.0, 10.0)}  # step -> group, chosen at, published at


def make_log(max_staleness: int, concurrency: int) -> tuple[list[dict], list[dict]]:
    """(events, metrics). Synchronous: group 1 starts after the first update; ahead: with group 0, but for 1.1."""
    ahead = max_staleness > 0
    events = [
        {
            "t": 0.0,
            "event": "run",
            "mode": "async" if ahead else "sync",
            "max_staleness": max_staleness,
            "stale_policy": "wait",
            "on_stragglers": "cancel",
            "groups_per_step": 1,
            "group_size": 2,
            "admit_ahead": 2,
            "oversample_factor": 1.0,
            "concurrency": concurrency,
            "steps": 2,
            "version": 0,
        }
    ]

    def log(t: float, event: str, **fields) -> None:
        events.append({"t": t, "event": event} | fields)

    def start(t: float, name: str, version: int) -> None:
        log(t, "started", trajectory=name, group=int(name[0]), version=version, sampler=0)

    def finish(name: str, version: int) -> None:
        t, of = ENDS[name], {"trajectory": name, "group": int(name[0])}
        segments, tools = SECONDS[name]
        for seconds in segments:
            fields = {"version": version, "kv_version": version, "tokens": 4, "cached": 0, "sampler": 0}
            log(t, "segment", **of, **fields, seconds=seconds)
        for seconds in tools:
            log(t, "tool", **of, name="guess", seconds=seconds, error=None)
        log(t, "trajectory", **of, tokens=4 * len(segments), reward=1.0, truncated=None)

    def train(step: int, tokens: int, ages: tuple[int, int]) -> None:
        group, chosen, published = BATCHES[step]
        log(chosen, "ready", group=group)
        wait = {"group": group, "trajectory": None, "why": "ready", "detail": ""}
        log(chosen, "wait", step=step, seconds=2.5 * step, **wait)
        batch = {"masked": 0, "dropped": 0, "age_min": ages[0], "age_max": ages[1], "updated": True}
        log(chosen, "batch", step=step, version=step - 1, groups=[group], tokens=tokens, **batch)
        log(published, "optim", step=step, **{"from": step - 1, "to": step}, seconds=0.5)
        log(published, "published", version=step, slot=step, bytes=8, seconds=0.0625)

    log(1.0, "admitted", group=0, row=0, version=0)
    if ahead:
        log(1.0, "admitted", group=1, row=1, version=0)
    for name in ("0.0", "0.1"):
        start(1.0, name, 0)
    if ahead:
        start(1.0, "1.0", 0)
    finish("0.0", 0)
    finish("0.1", 0)
    train(1, 8, (0, 0))
    if not ahead:
        log(4.0, "admitted", group=1, row=1, version=1)
        start(4.0, "1.0", 1)
    start(4.0, "1.1", 1)
    finish("1.0", 0 if ahead else 1)
    finish("1.1", 1)
    train(2, 12, (0, 1 if ahead else 0))
    counts = {"steps": 2, "admitted": 2, "consumed": 2, "filtered": 0, "failed": 0, "outstanding": 0}
    log(10.0, "end", status="completed", **counts)
    metrics = [
        {
            "step": step,
            "time": published,
            "train/updated": 1,
            "train/forward_seconds": 0.125,
            "train/backward_seconds": 0.25,
            "train/optimizer_seconds": 0.0625,
            "train/publish_seconds": 0.0625,
            "train/seconds": 1.0,
            "staleness/wait_seconds": 0.75 * (step - 1),
            "sampling/generated_tokens": 12 * step,
            "reward/mean": 0.5 * step,
        }
        for step, (_, _, published) in BATCHES.items()
    ]
    return events, metrics


def write(run_dir, events, metrics) -> None:
    run_dir.mkdir(parents=True)
    for name, lines in (("events", events), ("metrics", metrics)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_work_is_the_segments_tools_and_training_of_the_logs():
    work = read_work(*make_log(0, 2))
    assert work.durations == [[1.5, 2.0], [3.0, 4.0]]
    assert work.train_seconds == [0.5, 0.5]
    assert (work.concurrency, work.rules.max_staleness, work.rules.steps) == (2, 0, 2)


@pytest.mark.parametrize(
    ("max_staleness", "concurrency", "ends"),
    [
        (0, 2, [2.5, 2.5 + 4.5]),  # sampling 2, training; sampling 4, training
        (1, 4, [2.5, 4.5]),  # both groups start at 0, done at 2 and 4
        (1, 2, [2.5, 6.5]),  # two places: 1.0 runs from 1.5 to 4.5, 1.1 from 2 to 6
    ],
)
def test_ideal_is_the_schedule_with_the_runs_own_times(max_staleness, concurrency, ends):
    replayed = ideal(read_work(*make_log(max_staleness, concurrency)))
    assert [step.end_at for step in replayed.steps] == ends
    assert ideal_speed(replayed) == 1 / (ends[1] - ends[0])


def test_ideal_of_one_schedule_with_another_runs_times():
    events, metrics = make_log(0, 2)
    twice = [event | {"seconds": 2 * event["seconds"]} if "seconds" in event else event for event in events]
    replayed = ideal(read_work(*make_log(1, 4)), times=read_work(twice, metrics))
    assert [step.end_at for step in replayed.steps] == [4.5, 8.5]


def test_measures_of_a_synchronous_run():
    events, metrics = make_log(0, 2)
    found = measure(events, metrics, read_work(events, metrics))
    assert (found.steps, found.interval_seconds, found.steps_per_second) == (2, 6.0, 1 / 6)
    assert found.whole_steps_per_second == 2 / 9  # from 1.0, the first admission, to 10.0
    assert found.generated_tokens_per_second == 24 / 6  # of the second batch's interval
    assert found.learner_busy_frac == 0.5 / 6
    assert (found.wait_seconds, found.bound_wait_seconds) == (5.0, 0.75)
    assert (found.age_p50, found.age_p99, found.age_max) == (0, 0, 0)
    assert found.reward_last == 0.75
    assert found.ideal_steps_per_second == 1 / 4.5
    assert found.achieved_of_ideal == 0.75
    assert found.ideal_busy_frac == 1.0 / 7.0
    assert found.trajectory_work_frac == 10.5 / (2.0 + 2.5 + 4.0 + 5.0)
    assert found.update_work_frac == 0.5


def test_ages_count_the_segments_of_all_batches_after_the_first():
    events, metrics = make_log(1, 4)
    found = measure(events, metrics, read_work(events, metrics))
    # 1.0 has one segment of age 1, 1.1 two of age 0.
    assert (found.age_p50, found.age_max) == (0, 1)
    assert found.age_p99 == pytest.approx(0.98)


def test_a_trajectory_that_never_ended_has_no_ideal():
    events, metrics = make_log(0, 2)
    cut = [event for event in events if (event["event"], event.get("trajectory")) != ("trajectory", "1.1")]
    with pytest.raises(BenchError, match=r"Trajectory 1\.1 was admitted but never ended"):
        read_work(cut, metrics)


def test_a_batch_without_an_update_has_no_ideal():
    events, metrics = make_log(0, 2)
    metrics[1]["train/updated"] = 0
    with pytest.raises(BenchError, match="Batch 2 held no gradient"):
        read_work(events, metrics)


def test_one_step_has_no_speed():
    with pytest.raises(BenchError, match="1 steps"):
        steady_speed([3.0])


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_sound_log_passes_the_audit(tmp_path, max_staleness):
    write(tmp_path / "run", *make_log(max_staleness, 4))
    check_audit(tmp_path / "run", steps=2)
    assert read_run(tmp_path / "run")[0].steps == 2
    with pytest.raises(BenchError, match="2 batches instead of 3"):
        check_audit(tmp_path / "run", steps=3)


def run_with_logs(monkeypatch, spoil=lambda events: events):
    """The bench, with runs that only leave hand-made logs."""

    async def leave_logs(config, evaluation):
        events, metrics = make_log(min(1, config.trainer.max_staleness), 4)
        write(async_vs_sync.Path(config.run_dir), spoil(events), metrics)

    monkeypatch.setattr("bench.arm.train", leave_logs)
    return async_vs_sync.COMMAND.main(["--steps", "2", "--seeds", "2", "--eval-games", "0"])


def test_report_of_two_seeds(monkeypatch, capsys):
    assert run_with_logs(monkeypatch) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [pair["seed"] for pair in report["seeds"]] == [0, 1]
    assert report["summary"]["steps_per_second_ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # Ahead with four places: 2 s between the ends of the steps, synchronous: 4.5 s.
    assert report["summary"]["ideal_ratio"]["median"] == pytest.approx(2.25)
    assert report["summary"]["ideal_ratio_with_sync_times"]["median"] == pytest.approx(2.25)
    assert report["summary"]["achieved_of_ideal_sync"]["median"] == pytest.approx(4.5 / 6)
    assert report["summary"]["achieved_of_ideal_async"]["median"] == pytest.approx(2 / 6)


def test_a_finding_of_the_audit_ends_the_bench_without_a_report(monkeypatch, capsys):
    def forget_tokens(events):
        return [event | {"tokens": 3} if event["event"] == "segment" else event for event in events]

    assert run_with_logs(monkeypatch, forget_tokens) == 1
    shown = capsys.readouterr()
    assert "steps_per_second" not in shown.out
    assert shown.err.startswith("bench: The audit of ") and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--step", "3"], "Did you mean --steps?"),
        (["--steps", "1"], "--steps is 1; it must be at least 2"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--seeds", "many"], "--seeds is 'many'; it must be a whole number"),
        (["--max-staleness", "0"], "--max-staleness is 0"),
        (["--tool-latency", "normal:50"], "--tool-latency is 'normal:50'"),
        (["--lr", "1"], "--lr is no option"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(arguments, part, capsys):
    assert async_vs_sync.COMMAND.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and part in shown.err and shown.err.count("\n") == 1


def test_a_directory_that_holds_a_run_is_refused(tmp_path, capsys):
    write(tmp_path / "async-1", *make_log(0, 2))
    assert async_vs_sync.COMMAND.main(["--out", str(tmp_path)]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_arms_differ_in_the_constants_of_their_mode_alone(tmp_path):
    def options(mode):
        values = async_vs_sync.config_of(async_vs_sync.Plan(device="cpu"), mode, 3, tmp_path).to_json()["config"]
        trainer = values.pop("trainer")
        engine = trainer.pop("engine")
        schedule = engine.pop("schedule")
        return values | trainer | engine | schedule

    sync, asynchronous = options("sync"), options("async")
    assert {name for name in sync if sync[name] != asynchronous[name]} == {
        "mode",
        "run_dir",
        "max_staleness",
        "concurrency",
    }
    assert sync["groups_per_step"] * sync["group_size"] == 64


@pytest.mark.parametrize(("games", "rows", "members"), [(16, 16, 1), (256, 256, 1), (1000, 256, 4)])
def test_held_out_games(games, rows, members):
    evaluator = evaluator_of(games)
    assert (len(evaluator.holdout), evaluator.every, evaluator.final_group_size) == (rows, 0, members)
    assert evaluator_of(0) is None
