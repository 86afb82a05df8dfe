"""Synchronous overlap on real processes: chunks of a batch give the update of the whole batch."""

import numpy as np
import pytest
from running import audit, make_trainer, published_weights

import pipeline as rl
from pipeline.tasks import guess

ROWS = [dict(row) for row in guess.train_rows(0)[:64]]
for index, row in enumerate(ROWS):  # groups of unequal deviations, one of them without a gradient
    row["rewards"] = [0.5] * 4 if index % 4 == 3 else [0.0, 1.0, 0.25 * (index % 3), 0.1]
CHUNKS = rl.ForwardBackwardBatch(min_sequences=4, min_tokens=None)
NO_OVERLAP = {"validate_batch": lambda trajectories, metrics: None}  # must see the batch first, so "auto" is off


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def train(model, run_dir, steps=2, **options):
    """Steps, and the weights after each. eps is large: Adam divides a gradient that is zero but for rounding by itself,
    and would turn a difference in its last bits into a whole step.
    """
    weights = []
    defaults = {"max_staleness": 0, "optimizer": rl.Adam(lr=1e-3, eps=1e-3, grad_clip_norm=0.5)}
    trainer = make_trainer(model, run_dir, env="process_envs:RowRewards", **(defaults | options))
    taken = rl.run(trainer, ROWS, steps, on_step=lambda step: weights.append(published_weights(model)))
    assert audit(run_dir) == 0
    return taken, weights


@pytest.mark.parametrize(
    ("normalize", "standardize"),
    [("token", False), ("sequence", True), ("batch", "batch"), ("sum", True), ("prompt", "batch")],
)
def test_chunks_give_the_weights_of_the_whole_batch(model, tmp_path, normalize, standardize):
    options = {"loss": rl.CISPO(normalize=normalize), "advantage": rl.GroupCentered(standardize=standardize)}
    whole, expected = train(model, tmp_path / "whole", **options, **NO_OVERLAP)
    chunked, weights = train(model, tmp_path / "chunked", **options, forward_backward_batch=CHUNKS)
    for before, after in zip(whole, chunked, strict=True):
        assert before.metrics["train/backward_chunks"] == before.metrics["train/gradient_scale"] == 1
        assert after.metrics["train/backward_chunks"] == 3  # the fourth group has no rows
        for name in ("train/loss", "train/grad_norm", "importance/ratio_mean", "mismatch/kl"):
            assert after.metrics[name] == pytest.approx(before.metrics[name], rel=1e-4, abs=1e-6), name
        for name in ("train/tokens", "train/datums", "reward/mean", "importance/clip_frac"):
            assert after.metrics[name] == before.metrics[name], name
        assert after.metrics["train/seconds"] == after.metrics["train/batch_seconds"]
    for one, other in zip(expected, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert not np.array_equal(weights[0], weights[1])


def test_chunks_give_the_weights_of_a_loss_with_terms_without_advantage(model, tmp_path):
    """The group without advantage trains, too, and the means over trained tokens are those of the whole batch."""
    options = {"loss": rl.GSPO(normalize="sequence"), "kl_coefficient": 0.5, "entropy_coefficient": 0.1}
    whole, expected = train(model, tmp_path / "whole", **options, **NO_OVERLAP)
    chunked, weights = train(model, tmp_path / "chunked", **options, forward_backward_batch=CHUNKS)
    for before, after in zip(whole, chunked, strict=True):
        assert after.metrics["train/backward_chunks"] == 4
        for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy", "importance/ratio_max"):
            assert after.metrics[name] == pytest.approx(before.metrics[name], rel=1e-4, abs=1e-6), name
    assert whole[1].metrics["train/kl"] > 0
    for one, other in zip(expected, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
