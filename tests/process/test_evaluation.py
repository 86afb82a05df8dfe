"""Evaluations beside training, on real processes: held by latches, so that what overlaps is decided and not timed."""

import asyncio
import json
import os
import re
import signal

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.data.row_order import RowOrder
from pipeline.processes.environment.environment_client import EnvironmentClient
from pipeline.run_dir.json_lines import JsonLines
from pipeline.tasks import guess

ROWS = guess.train_rows(0)
SECONDS = 60.0  # bound on every run
HELD = {"number": 5, "seed": 0, "waits_for": ["go"]}  # its trajectories stay in their first tool call until `go` exists


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def held_trainer(model, tmp_path, evaluator, **options):
    """Every batch has a gradient, so versions count batches."""
    return make_trainer(
        model,
        tmp_path / "run",
        env="process_envs:HeldGuess",
        arguments={"directory": str(tmp_path)},
        evaluator=evaluator,
        **({"groups_per_step": 2, "group_size": 2} | options),
    )


def train(trainer, steps, *, on_step=lambda step: None, on_wait=None):
    """The run's steps; `on_wait()` is called once, when the trainer waits for an evaluation. The leases of the run must
    all be given back, however it ends.
    """
    runs = []

    async def watch():
        while not trainer.waits_for.startswith("the evaluation of"):
            await asyncio.sleep(0.005)
        on_wait()

    async def collect():
        done = []
        watching = asyncio.ensure_future(watch()) if on_wait is not None else None
        try:
            async for step in trainer.run(ROWS, steps=steps):
                runs[:] = [trainer.engine.model._run]
                on_step(step)
                done.append(step)
        finally:
            if watching is not None:
                watching.cancel()
        return done

    try:
        return asyncio.run(asyncio.wait_for(collect(), SECONDS))
    finally:
        assert runs and set(runs[0].slots._leases) == {0}


def results_of(run_dir):
    return [json.loads(line) for line in (run_dir / "eval.jsonl").read_text(encoding="utf-8").splitlines()]


def test_training_goes_on_beside_an_evaluation_and_waits_when_the_next_is_due(model, tmp_path):
    told = []
    evaluator = rl.Evaluator([HELD, HELD | {"seed": 1}], every=2, group_size=2, final_group_size=3, sink=told.append)
    trainer = held_trainer(model, tmp_path, evaluator)
    finished = []  # evaluations, when each step was done
    steps = train(trainer, 5, on_step=lambda step: finished.append(len(told)), on_wait=(tmp_path / "go").touch)

    assert finished[:2] == [0, 0]  # two updates beside the evaluation of version 0
    measured = [(one.version, one.batch, one.rows, one.trajectories) for one in told]
    assert measured == [(0, 0, 2, 4), (2, 2, 2, 4), (4, 4, 2, 4), (5, 5, 2, 6)]
    assert [one.reward_mean for one in told] == pytest.approx([0.5, 0.5, 0.5, 1 / 3])
    assert trainer.evaluations == told
    results = results_of(tmp_path / "run")
    assert [(line["version"], line["batch"]) for line in results] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert all(line["seconds"] > 0 and line["generated_tokens_mean"] > 0 for line in results)

    waits = [event for event in events_of(tmp_path / "run", "wait") if event["why"] == "evaluation"]
    where = r"a trajectory of row [01] is in: \w.* for \d+ s, ended by environment_timeout = 600 s at the latest"
    detail = rf"the evaluation of version 0, which has finished 0 of 2 rows; {where}"
    assert waits[0]["step"] == 3 and re.match(detail, waits[0]["detail"])
    assert [step.metrics["evaluation/wait_seconds"] for step in steps[:2]] == [0.0, 0.0]
    assert steps[2].metrics["evaluation/wait_seconds"] > 0.0
    assert all(step.metrics["staleness/wait_count"] == 0 for step in steps[2:3])
    events = events_of(tmp_path / "run")
    kinds = [(event["event"], event.get("step", event.get("version"))) for event in events]
    assert kinds.index(("optim", 2)) < kinds.index(("evaluation", 0)) < kinds.index(("batch", 3))
    assert all(event["status"] == "completed" for event in events if event["event"] == "evaluation")
    assert all(event.get("group") is None or event["group"] >= 0 for event in events)
    assert audit(tmp_path / "run") == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert config["evaluator"]["holdout_rows"] == 2


def test_sampler_killed_during_an_evaluation_costs_no_result(model, tmp_path):
    def kill(step):
        if step.n == 1:
            os.kill(model._run.workers.samplers[0].pid, signal.SIGKILL)
        if step.n == 3:
            (tmp_path / "go").touch()

    trainer = held_trainer(model, tmp_path, rl.Evaluator([HELD], every=5, group_size=4, final_group_size=0))
    train(trainer, 4, on_step=kill)
    assert [(one.version, one.trajectories) for one in trainer.evaluations] == [(0, 4)]
    assert len(events_of(tmp_path / "run", "restart")) == 1
    assert audit(tmp_path / "run") == 0


def test_failed_evaluation_stops_the_run_and_keeps_its_updates(model, tmp_path):
    def let_go(step):
        if step.n == 2:
            (tmp_path / "go").touch()

    trainer = held_trainer(model, tmp_path, rl.Evaluator([HELD | {"fails": True}], every=100_000, group_size=2))
    with pytest.raises(rl.TrajectoryError, match=r"The evaluation of version 0 failed at row 0: .*KeyError"):
        train(trainer, 100_000, on_step=let_go)
    assert trainer.evaluations == [] and results_of(tmp_path / "run") == []
    updates = len(events_of(tmp_path / "run", "published"))
    assert 2 <= updates == len(events_of(tmp_path / "run", "batch"))  # the update that had begun is whole, too
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["steps"]) == ("failed", updates)
    (evaluation,) = events_of(tmp_path / "run", "evaluation")
    assert (evaluation["status"], evaluation["reward_mean"]) == ("failed", None)
    assert audit(tmp_path / "run") == 0


@pytest.mark.parametrize(("every", "steps", "trained"), [(1, 5, 1), (0, 2, 2)], ids=["between steps", "at the end"])
def test_stop_request_during_an_evaluation_ends_the_run_in_order(model, tmp_path, every, steps, trained):
    trainer = held_trainer(model, tmp_path, rl.Evaluator([HELD], every=every, group_size=2, final_group_size=2))
    done = train(trainer, steps, on_wait=trainer.request_stop)  # the evaluation would never end by itself
    assert len(done) == trained and trainer.stopped and trainer.evaluations == []
    assert [event["status"] for event in events_of(tmp_path / "run", "evaluation")] == ["stopped"]
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["stopped"]
    assert audit(tmp_path / "run") == 0


def test_evaluation_never_runs_more_trajectories_than_its_share(model, tmp_path, monkeypatch):
    """With 8 places of training's own an evaluation has 2, and six rows of two to fill them. Its slot is held by those
    two and by itself, for those that come after them.
    """
    opened, open_environment = [], EnvironmentClient.open

    def note(client, group, member):
        if group < 0:
            opened.append((group, member))
        return open_environment(client, group, member)

    monkeypatch.setattr(EnvironmentClient, "open", note)
    held = []

    def let_go(step):
        if step.n <= 3:
            held.append(len(opened))
        if step.n == 3:
            assert model._run.slots.num_leases(0) == 3
            (tmp_path / "go").touch()

    rows = [HELD | {"seed": seed} for seed in range(6)]
    evaluator = rl.Evaluator(rows, every=10, group_size=2, final_group_size=0)
    trainer = held_trainer(model, tmp_path, evaluator, schedule=rl.Schedule(concurrency=8), max_staleness=0)
    train(trainer, 4, on_step=let_go)
    assert held == [2, 2, 2]  # nobody leaves before `go`, and nobody is added
    assert len(opened) == len(set(opened)) == trainer.evaluations[0].trajectories == 12


def test_training_samples_the_same_with_and_without_an_evaluator(model, tmp_path):
    def tokens_of(name, evaluator):
        seen = []

        def note(trajectories, metrics):
            seen.append([[(span.kind, tuple(span.tokens)) for span in one.spans] for one in trajectories])

        trainer = make_trainer(
            model,
            tmp_path / name,
            max_staleness=0,
            validate_batch=note,
            evaluator=evaluator,
            optimizer=rl.Adam(lr=1e-4),
        )
        for step in rl.run(trainer, ROWS, steps=3):  # and its tokens are none of training's
            assert step.metrics["sampling/generated_tokens"] == step.metrics["train/generated_tokens"]
        return seen, trainer.evaluations

    evaluator = rl.Evaluator(guess.holdout_rows()[:16], every=1, group_size=2, final_group_size=2)
    alone, _ = tokens_of("alone", None)
    beside, evaluations = tokens_of("beside", evaluator)
    assert alone == beside
    assert [one.version for one in evaluations] == [0, 1, 2, 3]


def test_evaluations_of_equal_weights_are_equal(model, tmp_path):
    """Noise belongs to (seed, row, member), not to the version: policies are compared on equal terms."""
    evaluator = rl.Evaluator(guess.holdout_rows()[:16], every=1, group_size=2, final_group_size=2)
    trainer = make_trainer(model, tmp_path / "run", evaluator=evaluator, optimizer=rl.Adam(lr=1e-12))
    rl.run(trainer, ROWS, steps=2)
    first, second, third = [(one.reward_mean, one.generated_tokens_mean) for one in trainer.evaluations]
    assert first == second == third


def test_sink_that_raises_stops_the_run_after_the_result_is_on_disk(model, tmp_path):
    def sink(evaluation):
        raise ValueError(f"no place for {evaluation.version}")

    evaluator = rl.Evaluator(guess.holdout_rows()[:2], every=0, final_group_size=1, sink=sink)
    trainer = make_trainer(model, tmp_path / "run", evaluator=evaluator)
    with pytest.raises(rl.RunError, match="Evaluator.sink raised ValueError for the evaluation of version 1: no place"):
        rl.run(trainer, ROWS, steps=1)
    assert [line["version"] for line in results_of(tmp_path / "run")] == [1]
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["failed"]


def test_full_disk_is_one_sentence(model, tmp_path, monkeypatch):
    def lines(path, **options):
        return JsonLines("/dev/full" if path.name == "eval.jsonl" else path, **options)

    monkeypatch.setattr("pipeline.training.open_files.JsonLines", lines)
    evaluator = rl.Evaluator(guess.holdout_rows()[:2], every=0, final_group_size=1)
    trainer = make_trainer(model, tmp_path / "run", evaluator=evaluator)
    with pytest.raises(rl.RunError, match="No space left"):
        rl.run(trainer, ROWS, steps=1)
    assert [event["status"] for event in events_of(tmp_path / "run", "evaluation")] == ["failed"]


def test_held_out_rows_are_not_trained_and_rows_are_logged_by_their_ids(model, tmp_path):
    rows = [row | {"id": f"row {index}"} for index, row in enumerate(ROWS[:6])]
    del rows[1]["id"], rows[5]["id"]
    evaluator = rl.Evaluator(rows[:3], every=0, final_group_size=1)
    trainer = make_trainer(model, tmp_path / "run", evaluator=evaluator, shuffle=True, sampling={"seed": 3})
    with pytest.raises(rl.ConfigError, match="All 3 training rows are in Evaluator.holdout too"):
        rl.run(trainer, rows[:3], steps=1)
    assert not (tmp_path / "run").exists()
    with pytest.warns(UserWarning, match="3 of 6 training rows are in Evaluator.holdout too"):
        rl.run(trainer, rows, steps=1)
    admitted = events_of(tmp_path / "run", "admitted")
    order = RowOrder([3], seed=3)  # of the three left
    assert [event["row"] for event in admitted] == [order.row(index) for index in range(len(admitted))]
    assert {(event["row"], event.get("id")) for event in admitted} == {(0, "row 3"), (1, "row 4"), (2, None)}
    (result,) = results_of(tmp_path / "run")
    assert [(one["row"], one.get("id")) for one in result["row_rewards"]] == [(0, "row 0"), (1, None), (2, "row 2")]
    assert sum(one["reward_mean"] for one in result["row_rewards"]) / 3 == pytest.approx(result["reward_mean"])
    assert audit(tmp_path / "run") == 0
