"""Rows that begin with the same prompt: it goes through the model once, and nothing that is computed changes."""

import numpy as np
import pytest
import torch

from workers.learning.packing import TrainingRows, micro_batches
from workers.learning.training import Trainee
from workers.model import init_flat
from workers.model_config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=64,
    layer_windows=(0, 6),
)
# (prompt, its length, generated tokens): families of three, two and one row, in no order; one of a single prompt token.
MEMBERS = [(0, 12, 5), (1, 7, 9), (0, 12, 3), (2, 5, 4), (1, 7, 2), (0, 12, 8), (3, 1, 3), (3, 1, 6)]


def make_rows(members=MEMBERS, seed=0, idle=()):
    """Several generated stretches a row, each behind framing; rows of `idle` have weight 0."""
    rng = np.random.default_rng(seed)
    prompts = {prompt: rng.integers(0, 50, length) for prompt, length, _ in members}
    tokens, versions = [], []
    for prompt, length, generated in members:
        framing = 2
        tokens.append(np.concatenate((prompts[prompt], rng.integers(0, 50, 2 * generated + framing))))
        marks = np.full(len(tokens[-1]), -1)
        marks[length : length + generated] = 0
        marks[length + generated + framing :] = 1
        versions.append(np.append(marks[1:], -1))  # of the token predicted
    lengths = np.array([len(row) for row in tokens], np.int32)
    is_generated = np.concatenate(versions) >= 0
    total = len(is_generated)
    idle_tokens = np.repeat(np.isin(np.arange(len(members)), idle), lengths)
    return TrainingRows(
        lengths=lengths,
        tokens=np.concatenate(tokens).astype(np.int32),
        weights=np.where(is_generated & ~idle_tokens, rng.normal(size=total), 0).astype(np.float32),
        scales=np.where(is_generated, 0.5, 0).astype(np.float32),
        behaviour_logprobs=np.where(is_generated, -rng.random(total), 0).astype(np.float32),
        versions=np.concatenate(versions).astype(np.int32),
    )


def make_trainee(**options):
    initial = init_flat(CONFIG, seed=1)
    return Trainee(CONFIG, initial, optimizer={}, loss={"name": "PPO", "clip_low": 0.2, "clip_high": 0.2}, **options)


def test_each_row_still_sees_its_whole_past_and_a_common_token_is_computed_once():
    rows = make_rows()
    (batch,) = micro_batches(rows, max_tokens=10_000)
    num_rows, longest = batch.shape
    spread = batch.tokens[batch.pad_index].reshape(num_rows, longest)
    places = batch.positions[batch.pad_index].reshape(num_rows, longest)
    left = sorted(tuple(rows.tokens[start : start + n - 1]) for start, n in zip(rows.starts, rows.lengths, strict=True))
    read = sorted(set(rows.lengths - 1))
    found = []
    for row in range(num_rows):
        last = max(n for n in read if (places[row, :n] == np.arange(n)).all())
        found.append(tuple(spread[row, :last]))
    assert sorted(found) == left
    shared = sum(length - 1 for length in (12, 12, 7))  # of a prompt all but its last token, in all members but one
    assert len(batch.tokens) == batch.num_read - shared == rows.lengths.sum() - len(MEMBERS) - shared
    assert len(np.unique(batch.predict_index)) == len(batch.predict_index), "no prediction is made from a common token"


def test_places_of_common_tokens_are_all_places_that_show_them():
    (batch,) = micro_batches(make_rows(), max_tokens=10_000)
    real = np.zeros(len(batch.pad_index), dtype=bool)
    real[batch.pack_index] = True
    for token, places in zip(batch.common_tokens, batch.common_places, strict=True):
        real[places[places >= 0]] = True
        assert set(places[places >= 0]) >= {batch.pack_index[token]}
        assert (batch.pad_index[places[places >= 0]] == token).all()
    assert real.sum() == batch.num_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("idle", [(), (0, 4)])
def test_gradient_and_measures_are_those_of_rows_that_go_alone(idle, dtype):
    rows = make_rows(idle=idle)
    alone, together = make_trainee(micro_batch_tokens=1, dtype=dtype), make_trainee(dtype=dtype)
    expected, found = alone.forward_backward(rows, 1, True), together.forward_backward(rows, 1, True)
    error = (together.flat_grad - alone.flat_grad).norm() / alone.flat_grad.norm()
    assert alone.flat_grad.norm() > 0.1 and error < (1e-6 if dtype == torch.float32 else 0.02)
    for name in expected.keys() - {"train/forward_seconds", "train/backward_seconds"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-5 if dtype == torch.float32 else 0.1, abs=1e-4), name


def test_families_come_together_when_not_all_fit():
    rows = make_rows([(index % 4, 20, 3) for index in range(16)])
    for batch in micro_batches(rows, max_tokens=4 * 30):
        assert batch.shape[0] == 4 and len(batch.common_tokens) == 19


def test_prompts_of_equal_length_that_differ_are_not_shared():
    (batch,) = micro_batches(make_rows([(0, 9, 3), (1, 9, 3)]), max_tokens=1000)
    assert len(batch.common_tokens) == 0 and len(batch.tokens) == batch.num_read
