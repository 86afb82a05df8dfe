"""Each loss in a real run, one trainer after the other on one Supervisor: weights move, and the metrics tell how."""

import math
import warnings

import numpy as np
import pytest
from running import audit, events_of, make_trainer, published_weights

import pipeline as rl
from pipeline.tasks import guess
from workers.model import init_flat
from workers.model_config import layout

ROWS = guess.train_rows(0)
STEPS = 4
RATIO_METRICS = {"importance/ratio_mean", "importance/ratio_max", "importance/clip_frac"}
CAPPED_METRICS = {"importance/capped_mean", "importance/capped_frac"}


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def train(model, run_dir, loss, **options):
    """(steps, first weights, last weights)."""
    weights = [init_flat(model.model_config, seed=0).numpy()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(model, run_dir, loss=loss, optimizer=rl.Adam(lr=5e-3), **options)
    steps = rl.run(trainer, ROWS, steps=STEPS, on_step=lambda step: weights.append(published_weights(model)))
    assert audit(run_dir) == 0
    return steps, weights[0], weights[-1]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (rl.CISPO(normalize="token"), RATIO_METRICS),
        (rl.PPO(normalize="sequence"), RATIO_METRICS),
        (rl.DecoupledPPO(normalize="batch"), RATIO_METRICS | CAPPED_METRICS),
        (rl.ImportanceSampling(normalize="prompt"), RATIO_METRICS),
        (rl.PolicyGradient(normalize="token"), set()),
        (rl.GSPO(normalize="sequence"), RATIO_METRICS),
        (rl.CustomLoss("user_losses:clipped", normalize="token"), RATIO_METRICS - {"importance/clip_frac"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_loss_trains(model, tmp_path, loss, expected):
    steps, first, last = train(model, tmp_path / "run", loss)
    updated = [step.metrics for step in steps if step.metrics["train/updated"]]
    assert updated and np.isfinite(last).all() and np.abs(last - first).max() > 1e-3
    for metrics in updated:
        assert {name for name in metrics if name.startswith("importance/")} == expected
        assert all(math.isfinite(value) for value in metrics.values())
        if expected:
            assert 0 < metrics["importance/ratio_mean"] <= metrics["importance/ratio_max"]
    # The first batch is sampled from the weights it trains: samplers and learner agree, and every ratio is 1.
    assert updated[0]["mismatch/max_abs_logprob"] < 1e-4
    if expected:
        assert updated[0]["importance/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_terms_without_advantage_train_and_are_measured(model, tmp_path):
    """Every reward is the same, so no row has an advantage: only entropy bonus and KL divergence move weights."""

    class Equal(guess.Guess):
        async def reward(self, trajectory, row):
            return 0.5

    options = {"env": Equal, "kl_coefficient": 0.1, "entropy_coefficient": 0.5}
    steps, first, last = train(model, tmp_path / "terms", rl.PPO(normalize="token"), **options)
    metrics = [step.metrics for step in steps]
    assert [m["train/updated"] for m in metrics] == [1] * STEPS and np.abs(last - first).max() > 1e-3
    assert all(m["reward/zero_variance_group_frac"] == 1 and m["train/datums"] == 16 for m in metrics)
    assert metrics[0]["train/kl"] == 0.0 < metrics[-1]["train/kl"]
    assert 0 < metrics[0]["train/entropy"] <= math.log(model.model_config.vocab_size)
    assert metrics[0]["train/loss"] == pytest.approx(-0.5 * metrics[0]["train/entropy"], rel=1e-5)

    steps = rl.run(make_trainer(model, tmp_path / "none", env=Equal), ROWS, steps=2)
    assert [step.model_step for step in steps] == [0, 0]
    assert all("train/kl" not in step.metrics and step.metrics["train/datums"] == 0 for step in steps)


def test_first_ratio_is_1_under_another_temperature(model, tmp_path):
    steps, _, _ = train(model, tmp_path / "cool", rl.PPO(normalize="token"), sampling={"temperature": 0.6})
    assert steps[0].metrics["importance/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert steps[0].metrics["mismatch/max_abs_logprob"] < 1e-4


def test_bfloat16_samplers_and_learner_compute_with_the_same_weights(model, tmp_path, monkeypatch):
    """Slots are half as large, and the log-probs of both sides differ by the rounding of activations only."""
    monkeypatch.setattr(model, "dtype", "bfloat16")  # as if the Supervisor had been made so
    steps = rl.run(make_trainer(model, tmp_path / "run", max_staleness=0), ROWS, steps=2)
    num_elements = layout(model.model_config).num_elements
    assert audit(tmp_path / "run") == 0
    updated = [step.metrics for step in steps if step.metrics["train/updated"]]
    published = [event["bytes"] for event in events_of(tmp_path / "run", "published")]
    assert updated and published == [2 * num_elements] * len(published)
    # Above 1e-4 on most CPUs; those with bfloat16 arithmetic of their own round both sides alike, to 5e-7.
    assert max(metrics["mismatch/max_abs_logprob"] for metrics in updated) < 0.1


def test_users_loss_that_is_none_ends_the_run_with_its_reason(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run", loss=rl.CustomLoss("user_losses:summed", normalize="token"))
    with pytest.raises(rl.HeadwayError, match=r"user_losses:summed returned shape .*normalize does"):
        rl.run(trainer, ROWS, steps=STEPS)


def test_users_loss_that_cannot_be_imported_ends_the_run_before_its_first_batch(model, tmp_path, monkeypatch):
    (tmp_path / "broken_losses.py").write_text("import no_such_package\n\n\ndef clipped(p, q, a, m, s): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = make_trainer(model, tmp_path / "run", loss=rl.CustomLoss("broken_losses:clipped", normalize="token"))
    with pytest.raises(rl.HeadwayError, match=r"broken_losses:clipped' can't be imported: .*no_such_package"):
        rl.run(trainer, ROWS, steps=STEPS)
    assert not events_of(tmp_path / "run", "admitted")
    assert len(rl.run(make_trainer(model, tmp_path / "next"), ROWS, steps=1)) == 1
