"""Whole runs on real processes, kept alive between the tests that can share them."""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from running import audit, events_of, make_trainer, worker_processes

import pipeline as rl
from pipeline.run_dir.json_lines import JsonLines
from pipeline.run_dir.run_files import METRICS
from pipeline.tasks import guess
from workers.errors import WorkerDied

ROWS = guess.train_rows(0)


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def test_async_run_keeps_its_bound_and_passes_the_audit(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")
    steps = rl.run(trainer, ROWS, steps=8)
    assert [step.n for step in steps] == list(range(1, 9))
    assert [step.model_step for step in steps][-1] == sum(step.metrics["train/updated"] for step in steps)
    assert max(step.metrics["staleness/span_age_max"] for step in steps) <= 2
    assert audit(tmp_path / "run") == 0
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["completed"]


def test_every_metric_is_documented(model, tmp_path):
    steps = rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=2)
    text = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z]+/[a-z_0-9/<>]+)`", text))
    families = tuple(name.partition("<")[0] for name in documented if "<" in name)
    reported = {name for step in steps for name in step.metrics if not name.startswith(families)}
    assert reported - documented == set()


def test_trainer_names_whom_it_waits_for_from_start_to_end(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")

    async def train():
        seen = [trainer.waits_for]

        async def watch():
            while True:
                seen.append(trainer.waits_for)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        async for _ in trainer.run(ROWS, steps=2):
            pass
        watching.cancel()
        return [*seen, trainer.waits_for]

    seen = asyncio.run(train())
    assert seen[0] == seen[-1] == ""
    for part in ("the processes to start", "too few finished groups; group 0", "the learner, which trains batch 2"):
        assert any(words.startswith(part) for words in seen), part


def test_config_json_tells_what_was_run(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")
    rl.run(trainer, ROWS, steps=1)
    record = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert record["headway"] == rl.__version__ and record["torch"] and record["python"]
    assert record["seed"] == trainer.config.engine.seed
    assert record["config"]["class"] == "TrainerConfig"
    assert record["config"]["engine"]["schedule"]["concurrency"] == 192


def test_row_that_cannot_travel_is_refused_before_anything_is_made(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")
    with pytest.raises(rl.ConfigTypeError, match=r"Row 1 has \{3\} as its 'number'"):
        rl.run(trainer, [{"number": 3}, {"number": {3}}], steps=1)
    assert not (tmp_path / "run").exists()


def test_run_whose_metrics_cannot_be_written_has_failed(model, tmp_path, monkeypatch):
    def on_a_full_disk(path, **options):
        return JsonLines("/dev/full" if path.name == METRICS else path, **options)

    monkeypatch.setattr("pipeline.training.open_files.JsonLines", on_a_full_disk)
    with pytest.raises(rl.RunError, match="No space left"):
        rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=3)
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["steps"]) == ("failed", 1)
    assert audit(tmp_path / "run") == 0


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_first_batch_is_on_policy_and_sampler_and_learner_agree(model, tmp_path, max_staleness):
    options = {"groups_per_step": 8, "group_size": 8, "max_staleness": max_staleness}
    steps = rl.run(make_trainer(model, tmp_path / "run", **options), ROWS, steps=3)
    on_policy = steps if max_staleness == 0 else steps[:1]  # synchronous: every batch has age 0
    for step in on_policy:
        assert step.metrics["staleness/span_age_max"] == 0
        assert step.metrics["mismatch/max_abs_logprob"] <= 1e-5
        assert step.metrics["importance/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert step.metrics["importance/ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_processes_are_used_again_by_the_next_run(model, tmp_path):
    rl.run(make_trainer(model, tmp_path / "first"), ROWS, steps=1)
    before = {process.pid for process in worker_processes(os.getpid())}
    rl.run(make_trainer(model, tmp_path / "second", max_staleness=1), ROWS, steps=2)
    assert {process.pid for process in worker_processes(os.getpid())} == before
    assert {path.name for path in (tmp_path / "second" / "logs").iterdir()} >= {"learner-0.log", "sampler-0.log"}


@pytest.mark.parametrize("trained_at", [10, 11, 12])
def test_group_of_version_10_trains_at_10_11_or_12_and_never_at_13(model, tmp_path, trained_at):
    """With batches of 2 and one group of surplus, groups 21 and 22 are admitted at version 10. Group 21 is held in
    its tool until version `trained_at`; its competitors there wait for it, except at 12, where nothing but the bound
    makes the trainer wait.
    """
    run_dir, held = tmp_path / "run", 21
    rows = [dict(row) for row in ROWS[:40]]
    rows[held] |= {"waits_for": ["release"], "marks": "done"}
    for group in {10: (20, 22), 11: (23, 24), 12: ()}[trained_at]:
        rows[group]["waits_for"] = ["done.0", "done.1"]
    release = tmp_path / "release"

    def let_go(step):
        if step.model_step == trained_at:
            if trained_at < 12:
                release.touch()
            else:  # long enough to train at 13, if anything would
                threading.Timer(1.0, release.touch).start()

    trainer = make_trainer(
        model,
        run_dir,
        env="process_envs:HeldGuess",
        arguments={"directory": str(tmp_path)},
        schedule=rl.Schedule(concurrency=64, admit_ahead=0, oversample_factor=1.5),
        groups_per_step=2,
        group_size=2,
    )
    rl.run(trainer, rows, steps=15, on_step=let_go)

    admitted = {event["group"]: event["version"] for event in events_of(run_dir, "admitted")}
    versions = [event["version"] for event in events_of(run_dir, "batch") if held in event["groups"]]
    assert (admitted[held], versions) == (10, [trained_at])
    assert audit(run_dir) == 0


def test_gate_refuses_a_step_that_the_supervisor_should_not_have_asked_for(model, tmp_path, monkeypatch):
    """With the schedule's own check broken, the learner still refuses, and the run names the group."""
    monkeypatch.setattr("pipeline.schedule.first_blocker", lambda *facts: None)
    monkeypatch.setattr("pipeline.schedule.fits", lambda *facts: True)
    rows = [dict(row, waits_for=["never"] if index == 0 else []) for index, row in enumerate(ROWS[:64])]
    trainer = make_trainer(
        model, tmp_path / "run", env="process_envs:HeldGuess", arguments={"directory": str(tmp_path)}
    )
    with pytest.raises(WorkerDied, match=r"learner.*[Gg]roup 0"):
        rl.run(trainer, rows, steps=10)


def test_sampler_killed_in_mid_segment_is_restarted_and_nothing_is_lost(model, tmp_path):
    run_dir = tmp_path / "run"
    trainer = make_trainer(model, run_dir)

    async def train():
        async for step in trainer.run(ROWS, steps=12):
            if step.n in (2, 6):
                sampler = model._run.samplers[0]
                pid = model._run.workers.samplers[0].pid
                os.kill(pid, signal.SIGSTOP)  # so that requests are with it when it dies
                for _ in range(500):
                    await asyncio.sleep(0.01)
                    if sampler._sent:
                        break
                assert sampler._sent, "no request was in flight"
                os.kill(pid, signal.SIGKILL)

    asyncio.run(train())
    assert len(events_of(run_dir, "restart")) == 2
    assert audit(run_dir) == 0
    numbers = [event["trajectory"] for event in events_of(run_dir, "trajectory")]
    assert len(numbers) == len(set(numbers)) == 12 * 16


def test_learner_that_dies_again_and_again_ends_the_run_with_one_sentence(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "max_restarts", 1)
    trainer = make_trainer(model, tmp_path / "run")
    with pytest.raises(
        rl.RunError, match=r"Learners died 2 times .* The last: The learner 0 \(pid \d+\) was killed by"
    ):
        rl.run(trainer, ROWS, steps=50, on_step=lambda step: os.kill(model._run.workers.learner.pid, signal.SIGKILL))
    assert events_of(tmp_path / "run", "end")[0]["status"] == "failed"
    assert audit(tmp_path / "run") == 0


def test_environment_process_that_dies_again_and_again_ends_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "max_restarts", 2)
    trainer = make_trainer(model, tmp_path / "run")

    def kill(step):
        victim = model._run.workers.environments[0]
        if victim.ready:
            with contextlib.suppress(ProcessLookupError):  # it has gone already, which nobody has noticed yet
                os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(rl.RunError, match=r"died 3 times .* The last: The environment 0 \(pid \d+\) was killed by SIG"):
        rl.run(trainer, ROWS, steps=100, on_step=kill)
    assert audit(tmp_path / "run") == 0
    # The same supervisor starts what is missing and runs again.
    steps = rl.run(make_trainer(model, tmp_path / "again"), ROWS, steps=2)
    assert len(steps) == 2


@pytest.mark.parametrize(
    ("env", "sentence"),
    [("BrokenReward", r"BrokenReward.*reward.*KeyError"), ("NotANumber", r"NotANumber.*reward.*nan")],
)
def test_failed_trajectory_ends_the_run_and_names_the_call(model, tmp_path, env, sentence):
    trainer = make_trainer(model, tmp_path / "run", env=f"process_envs:{env}")
    with pytest.raises(rl.TrajectoryError, match=sentence):
        rl.run(trainer, ROWS, steps=20)
    assert audit(tmp_path / "run") == 0


def test_environment_that_takes_too_long_ends_the_run_and_is_named(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run", env="process_envs:Slow", arguments={"seconds": 60.0}, timeout=0.5)
    with pytest.raises(rl.TrajectoryError, match=r"Slow.*guess"):
        rl.run(trainer, ROWS, steps=2)


def test_environment_that_cannot_be_imported_is_one_sentence(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run", env="process_envs:Nothing")
    with pytest.raises(rl.HeadwayError, match="process_envs:Nothing"):
        rl.run(trainer, ROWS, steps=2)


def test_leaving_the_loop_early_ends_the_run_in_order(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run")

    async def train():
        steps = trainer.run(ROWS, steps=100)
        async for step in steps:
            if step.n == 2:
                break
        await steps.aclose()

    asyncio.run(train())
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["steps"]) == ("stopped", 2)
    assert audit(tmp_path / "run") == 0


def test_wait_for_a_slow_trajectory_is_told_with_its_cause(model, tmp_path):
    """Group 0 is in its tool when the bound holds the trainer back for it. What it is at behind its tool counts, too,
    where that takes until somebody looks at the wait again.
    """
    run_dir, release = tmp_path / "run", tmp_path / "release"
    rows = [dict(row, waits_for=["release"] if index == 0 else []) for index, row in enumerate(ROWS[:64])]
    trainer = make_trainer(model, run_dir, env="process_envs:HeldGuess", arguments={"directory": str(tmp_path)})

    async def until(condition):
        async with asyncio.timeout(60.0):
            while not condition():
                await asyncio.sleep(0.01)

    def is_held():
        running = trainer._run.state()["trajectories"]["running"]
        return all(words.startswith("tool ") for name, words in running.items() if name.startswith("0."))

    async def let_go():
        """A second after the wait has begun; returns how long it was at least."""
        await until(lambda: "must train by version" in trainer.waits_for)
        began = time.monotonic()
        await asyncio.sleep(1.0)
        held = time.monotonic() - began
        release.touch()
        return held

    async def train():
        steps = []
        async for step in trainer.run(rows, steps=4):
            steps.append(step)
            if step.n == 2:  # two versions on, group 0 must be in the next batch
                await until(is_held)
                letting_go = asyncio.create_task(let_go())
        return steps, await letting_go

    steps, held = asyncio.run(train())
    bound = [event for event in events_of(run_dir, "wait") if event["step"] == 3 and event["why"] != "ready"]
    assert {event["group"] for event in bound} == {0} and bound[0]["why"] == "tool"
    assert all(event["trajectory"].startswith("0.") for event in bound)
    assert all("group 0 must train by version 2" in event["detail"] for event in bound)
    metrics = steps[2].metrics
    prefix = "staleness/wait_seconds/"
    causes = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    assert sum(causes.values()) == pytest.approx(metrics["staleness/wait_seconds"])
    assert {event["why"] for event in bound} <= causes.keys() <= {"tool", "sampling", "reward", "queue"}
    assert causes["tool"] >= held
    assert [event["step"] for event in events_of(run_dir, "batch") if 0 in event["groups"]] == [3]
