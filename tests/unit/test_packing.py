"""Rows and micro-batches: every prediction is made once, at its right place, and bad rows are named."""

import numpy as np
import pytest

from workers.errors import NonFiniteError
from workers.learning.packing import RowsError, TrainingRows, micro_batches


def make_rows(lengths, seed=0, generated_share=0.5, idle_rows=()):
    """Random rows; those of `idle_rows` have weight 0 everywhere."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    versions = np.where(rng.random(total) < generated_share, rng.integers(0, 4, total), -1).astype(np.int32)
    weights = rng.normal(size=total).astype(np.float32)
    start = 0
    for row, length in enumerate(lengths):
        versions[start + length - 1] = -1
        if row in idle_rows:
            weights[start : start + length] = 0
        start += length
    scales = np.random.default_rng(seed + 1).uniform(0.1, 1.0, total)
    return TrainingRows(
        lengths=np.array(lengths, np.int32),
        tokens=rng.integers(0, 50, total).astype(np.int32),
        weights=np.where(versions >= 0, weights, 0).astype(np.float32),
        scales=np.where(versions >= 0, scales, 0).astype(np.float32),
        behaviour_logprobs=np.where(versions >= 0, -rng.random(total), 0).astype(np.float32),
        versions=versions,
    )


LENGTHS = [5, 17, 2, 9, 9, 1, 30, 4]


def test_every_generated_token_is_predicted_once_from_its_own_past():
    rows = make_rows(LENGTHS, idle_rows=(3, 6))
    predicted = []
    for micro_batch in micro_batches(rows, max_tokens=40):
        predicted += micro_batch.sources.tolist()
        for index, target, source in zip(
            micro_batch.predict_index, micro_batch.targets, micro_batch.sources, strict=True
        ):
            row = int(np.searchsorted(np.cumsum(LENGTHS), source, side="right"))
            offset = source - sum(LENGTHS[:row])
            assert micro_batch.positions[index] == offset
            assert target == rows.tokens[source + 1]
            past = micro_batch.tokens[index - offset : index + 1]
            assert past.tolist() == rows.tokens[source - offset : source + 1].tolist()
    assert sorted(predicted) == np.flatnonzero(rows.versions >= 0).tolist()


def test_padding_and_packing_are_inverse():
    for micro_batch in micro_batches(make_rows(LENGTHS), max_tokens=40):
        num_rows, longest = micro_batch.shape
        assert len(micro_batch.pad_index) == num_rows * longest
        assert micro_batch.pad_index[micro_batch.pack_index].tolist() == list(range(len(micro_batch.tokens)))
        column = micro_batch.pack_index % longest
        assert column.tolist() == micro_batch.positions.tolist()


def test_micro_batches_stay_within_the_budget_and_a_longer_row_goes_alone():
    shapes = [m.shape for m in micro_batches(make_rows([3, 50, 4, 4, 12, 3], generated_share=1.0), max_tokens=12)]
    # Read lengths, longest first: 49 alone (above the budget), 11 alone, then four rows of 3, 3, 2, 2.
    assert shapes == [(1, 49), (1, 11), (4, 3)]


def test_rows_without_weight_need_no_gradient_and_stay_apart():
    rows = make_rows([6, 6, 6, 6], generated_share=1.0, idle_rows=(1, 2))
    found = [(m.shape, m.needs_gradient) for m in micro_batches(rows, max_tokens=1000)]
    assert found == [((2, 5), True), ((2, 5), False)]


def test_rows_without_weight_need_a_gradient_where_their_scale_trains_them():
    rows = make_rows([6, 6, 6, 6], generated_share=1.0, idle_rows=(1, 2))
    rows.scales[6:12] = 0  # row 1 is masked
    found = [(m.shape, m.needs_gradient) for m in micro_batches(rows, max_tokens=1000, by_scale=True)]
    assert found == [((3, 5), True), ((1, 5), False)]


def test_predictions_know_their_row():
    for micro_batch in micro_batches(make_rows(LENGTHS), max_tokens=40):
        starts = np.cumsum(micro_batch.positions == 0) - 1  # rows of the packed tokens, counted by their first ones
        assert micro_batch.rows.tolist() == starts[micro_batch.predict_index].tolist()


def test_rows_are_read_no_further_than_their_last_prediction():
    rows = make_rows([8, 5], generated_share=0.0)
    rows.versions[2] = 7
    (micro_batch,) = micro_batches(rows, max_tokens=1000)
    assert micro_batch.tokens.tolist() == rows.tokens[:3].tolist()  # the second row predicts nothing
    assert list(micro_batches(make_rows([8, 5], generated_share=0.0), max_tokens=1000)) == []


def test_good_rows_pass():
    make_rows(LENGTHS).check(vocab_size=50, max_positions=30)
    make_rows([]).check(vocab_size=50, max_positions=30)


@pytest.mark.parametrize(
    ("array", "index", "value", "error", "found"),
    [
        ("tokens", 6, 50, RowsError, r"row 1, token 1 holds 50.*\[0, 50\)"),
        ("tokens", 0, -1, RowsError, "row 0, token 0 holds -1"),
        ("versions", 4, 2, RowsError, "row 0, token 4 holds 2"),
        ("weights", 4, 0.5, RowsError, "row 0, token 4 holds 0.5.*needs a generated token"),
        ("scales", 4, 0.5, RowsError, "row 0, token 4 holds 0.5.*needs a generated token"),
        ("scales", 2, -0.5, RowsError, "row 0, token 2 holds -0.5.*at least 0"),
        ("scales", 3, 0, RowsError, "row 0, token 3 holds .*a weight needs a scale"),
        ("scales", 1, np.inf, NonFiniteError, "scale at row 0, token 1 is inf"),
        ("weights", 5, np.nan, NonFiniteError, "loss weight at row 1, token 0 is nan"),
        ("behaviour_logprobs", 6, -np.inf, NonFiniteError, "behaviour log-prob at row 1, token 1 is -inf"),
        ("lengths", 0, 4, RowsError, "14 tokens by their lengths.*15"),
    ],
)
def test_a_broken_row_is_named(array, index, value, error, found):
    rows = make_rows([5, 10], generated_share=1.0)
    getattr(rows, array)[index] = value
    with pytest.raises(error, match=found):
        rows.check(vocab_size=50, max_positions=30)


def test_a_row_longer_than_the_model_is_named():
    with pytest.raises(RowsError, match="Row 1 has 31 tokens.*30 positions"):
        make_rows([5, 31]).check(vocab_size=50, max_positions=30)
