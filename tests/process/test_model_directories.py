"""Runs on model directories, on real processes: each family trains, goes on from what was saved, and is measured."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from running import audit, events_of, make_trainer, published_weights, use

import pipeline as rl
from bench.small_models import FAMILIES, write_small_model
from pipeline.evaluation.without_training import EvaluationRun
from pipeline.models.model_directory import open_model, open_tiny
from pipeline.run_dir.run_directory import make_run_dir
from pipeline.tasks import TASKS, calculator, guess, search
from workers.model_config import TINY
from workers.model_files.flat_weights import load_flat
from workers.rope_scaling import RopeScaling

ENTROPY = 0.01  # a gradient for a model whose rewards are all equal


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def calculator_trainer(model, run_dir, **options):
    return make_trainer(
        model,
        run_dir,
        env=calculator.Calculator,
        budget=rl.Budget(max_turn_tokens=8, max_turns=2, max_context_tokens=4096),
        schedule=rl.Schedule(concurrency=8),
        entropy_coefficient=ENTROPY,
        **({"groups_per_step": 1, "group_size": 2} | options),
    )


def evaluate(model, directory, env, rows, group_size, version=0, **options):
    engine = rl.RolloutEngine(model, env=env, schedule=rl.Schedule(concurrency=8), **options)
    run = EvaluationRun(engine, rl.Evaluator(rows, every=0, final_group_size=group_size), version=version)
    return asyncio.run(run.run(make_run_dir(str(directory), {})))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_goes_on_from_what_it_saved(family, model, tmp_path):
    directory = write_small_model(tmp_path / "model", family=family, tie=family != "mistral")
    use(model, open_model(directory))
    rows = calculator.train_rows(0)[:4]
    trainer = calculator_trainer(model, tmp_path / "first")
    steps = rl.run(trainer, rows, steps=2)
    assert [step.model_step for step in steps] == [1, 2]
    assert all(step.metrics["mismatch/max_abs_logprob"] < 1e-4 for step in steps[:1])
    assert steps[0].metrics["train/entropy"] > 4.0, "log-probs that are all 0 would agree in any case"
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert config["model"]["directory"] == config["model"]["weights"] == str(directory)
    assert config["model"]["compute_dtype"] == "float32"
    saved = load_flat(trainer.checkpoint, model.model_config).numpy()
    assert not np.array_equal(saved, load_flat(directory, model.model_config).numpy())

    use(model, open_model(directory, init=tmp_path / "first"))
    first_weights = []
    rl.run(
        calculator_trainer(model, tmp_path / "second"),
        rows,
        steps=1,
        on_step=lambda step: first_weights.append(published_weights(model, version=0)),
    )
    assert np.array_equal(first_weights[0], saved)
    for name in ("first", "second"):
        assert audit(tmp_path / name) == 0


def test_a_model_with_windows_unrotated_layers_and_ids_without_token_trains(model, tmp_path):
    """Of windows, unrotated layers and stretched rotations: sampler and learner processes score alike."""
    chat = guess.chat_format()
    num_ids = chat.vocab_size
    config = replace(
        TINY,
        vocab_size=num_ids + 9,  # ids without token
        num_layers=3,
        layer_windows=(6, 0, 6),  # shorter than the contexts
        nope_layers=(1, 2),
        qkv_bias=True,
        out_bias=True,
        rope=RopeScaling(kind="yarn", factor=4.0, original_max_positions=16, attention_factor=1.2),
        max_positions=131072,
    )
    use(model, open_tiny(config, chat))
    trainer = make_trainer(model, tmp_path / "run", optimizer=rl.Adam(lr=5e-3))
    steps = rl.run(trainer, guess.train_rows(0), steps=3)
    assert audit(tmp_path / "run") == 0
    assert len(steps) == 3 and steps[0].metrics["train/updated"]
    # The first batch is sampled from the weights that it trains.
    assert 0 < steps[0].metrics["mismatch/max_abs_logprob"] < 1e-4
    assert events_of(tmp_path / "run", "end")


def test_an_evaluation_alone_finds_what_the_runs_last_one_found(model, tmp_path):
    tiny = rl.Supervisor(device="cpu").source
    use(model, tiny)
    rows = guess.holdout_rows()[:16]
    evaluator = rl.Evaluator(rows, every=0, final_group_size=3)
    trainer = make_trainer(model, tmp_path / "run", evaluator=evaluator)
    rl.run(trainer, guess.train_rows(0), steps=3)
    (within,) = trainer.evaluations

    use(model, open_tiny(tiny.config, tiny.chat, init=tmp_path / "run"))
    budget = trainer.config.engine.budget
    alone = evaluate(model, tmp_path / "eval", guess.Guess, rows, 3, version=within.version, budget=budget)
    assert within.version == 3 and 0.0 < within.reward_mean < 1.0
    for name in ("version", "rows", "trajectories", "reward_mean", "reward_std", "reward_stderr"):
        assert getattr(alone, name) == getattr(within, name)
    assert alone.generated_tokens_mean == within.generated_tokens_mean
    (line,) = [json.loads(line) for line in (tmp_path / "eval" / "eval.jsonl").read_text().splitlines()]
    assert line["reward_mean"] == alone.reward_mean
    assert [event["event"] for event in events_of(tmp_path / "eval") if event["event"] != "wait"] == [
        *("run", "evaluation", "end")
    ]
    assert audit(tmp_path / "eval") == 0


def test_at_temperature_0_an_evaluation_repeats_itself(model, tmp_path):
    use(model, open_model(write_small_model(tmp_path / "model", family="qwen3")))
    budget = rl.Budget(max_turn_tokens=8, max_turns=2, max_context_tokens=4096)
    rows = calculator.holdout_rows()[:2]
    options = {"budget": budget, "temperature": 0.0}
    found = []
    for seed in (0, 1):
        directory = tmp_path / f"eval{seed}"
        found.append(evaluate(model, directory, calculator.Calculator, rows, 1, seed=seed, **options))
    assert found[0].generated_tokens_mean == found[1].generated_tokens_mean > 0
    assert (found[0].rows, found[0].trajectories) == (2, 2)


def test_an_evaluation_can_be_stopped(model, tmp_path):
    use(model, rl.Supervisor(device="cpu").source)
    arguments, budget = {"directory": str(tmp_path)}, rl.Budget(max_turn_tokens=1)
    engine = rl.RolloutEngine(model, env="process_envs:HeldGuess", env_arguments=arguments, budget=budget)
    held = {"number": 5, "seed": 0, "waits_for": ["never"]}
    run = EvaluationRun(engine, rl.Evaluator([held], every=0, final_group_size=1))

    async def stop_when_it_runs():
        while run.rows_done is None:
            await asyncio.sleep(0.01)
        run.request_stop()

    async def measure():
        stopping = asyncio.ensure_future(stop_when_it_runs())
        found = await asyncio.wait_for(run.run(make_run_dir(str(tmp_path / "eval"), {})), 60)
        await stopping
        return found

    assert asyncio.run(measure()) is None and run.stopped
    statuses = [event["status"] for event in events_of(tmp_path / "eval") if event["event"] in ("evaluation", "end")]
    assert statuses == ["stopped", "stopped"]
    assert (tmp_path / "eval" / "eval.jsonl").read_text() == ""


def test_an_evaluation_by_itself_that_fails_has_the_reason_in_its_log(model, tmp_path, monkeypatch):
    async def measure(run, *arguments):
        raise rl.RunError("Samplers died 6 times.")

    monkeypatch.setattr(EvaluationRun, "_measure", measure)
    run = EvaluationRun(rl.RolloutEngine(model, env="process_envs:HeldGuess"), rl.Evaluator([{"number": 5}], every=0))
    with pytest.raises(rl.RunError):
        asyncio.run(run.run(make_run_dir(str(tmp_path / "eval"), {})))
    (end,) = events_of(tmp_path / "eval", "end")
    assert (end["status"], end["cause"]) == ("failed", "Samplers died 6 times.")


def test_search_speaks_to_the_tiny_model_and_to_model_directories(model, tmp_path):
    """The same rows; a word or a text that calls nothing is answered."""
    task, tiny = TASKS["search"], search.chat_format()
    sources = {
        "tiny": open_tiny(replace(TINY, vocab_size=tiny.vocab_size), tiny),
        "text": open_model(write_small_model(tmp_path / "model")),
    }
    for language, source in sources.items():
        use(model, source)
        engine = rl.RolloutEngine(
            model,
            env=search.Search,
            env_arguments=task.arguments_in(language),
            budget=rl.Budget(**task.budget[language]),
            schedule=rl.Schedule(concurrency=8),
        )
        directory = make_run_dir(str(tmp_path / language), {})
        found = asyncio.run(
            EvaluationRun(engine, rl.Evaluator(task.holdout_rows()[:2], every=0), version=0).run(directory)
        )
        assert (found.rows, found.trajectories, found.truncated_frac) == (2, 16, 0.0)
        assert 0.0 <= found.reward_mean < 0.5
