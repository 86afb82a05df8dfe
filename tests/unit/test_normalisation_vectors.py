"""Training rows and batch metrics as the vectors have them."""

import numpy as np
import pytest

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import TrainingBatch, make_batch
from pipeline.batches.rows import Rows
from pipeline.config import Truncation
from pipeline.trajectory import Group, Span, Trajectory
from tests import vectors

ESTIMATORS = {"GroupCentered": GroupCentered, "Batchwise": Batchwise}
ZERO_WEIGHT = 1e-9  # the vectors' own threshold


def make_groups(groups: list) -> list[Group]:
    made = []
    for index, members in enumerate(groups):
        group = Group(group=index, row=index, version=0)
        for member, given in enumerate(members):
            trajectory = Trajectory(index, member, index, reward=given["reward"], truncated=given["truncated"])
            trajectory.loss_mask_end = given["loss_mask_end"]
            first = 0  # ids count the trajectory's tokens, so that a row shows where it was cut
            for span in given["spans"]:
                tokens = list(range(first, first + span["length"]))
                first += span["length"]
                version, logprobs = span.get("policy_step", -1), span.get("logprobs")
                trajectory.spans.append(Span(span["kind"], tokens, version, version, logprobs, span["run"]))
            group.trajectories.append(trajectory)
        made.append(group)
    return made


def batch_of(case: dict, streamed: bool) -> TrainingBatch:
    options = dict(case["estimator"])
    rules = BatchRules(
        advantage=ESTIMATORS[options.pop("type")](**options),
        normalize=case["normalize"],
        truncation=Truncation(**case["truncation"]),
        min_members=case["min_members"],
        mask_older_than=case["mask_older_than"],
        streamed=streamed,
    )
    return make_batch(make_groups(case["groups"]), case["current_step"], rules)


def check_rows(rows: Rows, expected: list) -> None:
    ends = np.cumsum(rows.lengths)
    found = []
    for row, (end, length) in enumerate(zip(ends, rows.lengths, strict=True)):
        weights = rows.weights[end - length : end]
        if np.abs(weights).max() >= ZERO_WEIGHT:
            found.append((row, slice(end - length, end)))
    expected = [row for row in expected if np.abs(row["weights"]).max() >= ZERO_WEIGHT]
    assert [(rows.groups[row], rows.members[row], rows.lengths[row], rows.first_tokens[row]) for row, _ in found] == [
        (row["group"], row["member"], row["length"], row["first_token"]) for row in expected
    ]
    for (row, where), wanted in zip(found, expected, strict=True):
        first = wanted["first_token"]
        assert rows.tokens[where].tolist() == list(range(first, first + wanted["length"])), row
        np.testing.assert_allclose(rows.weights[where], wanted["weights"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(rows.behaviour_logprobs[where], wanted["behaviour_logprobs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("vector", vectors.load("normalisation"))
def test_rows_and_metrics_match_vector(vector):
    batch = batch_of(vector["case"], streamed=False)
    expected = vector["expected"]
    check_rows(batch.rows, expected["data"])
    assert {name: batch.metrics.get(name) for name in expected["metrics"]} == pytest.approx(
        expected["metrics"], rel=0, abs=1e-6
    )
    causes = {name for name in batch.metrics if name.startswith("truncated/")}
    assert causes == {name for name in expected["metrics"] if name.startswith("truncated/")}
    assert batch.gradient_scale == 1.0


def has_streamed(parameter) -> bool:
    (vector,) = parameter.values
    return vector is None or "streamed" in vector["expected"]  # None: the file is missing, the parameter is skipped


@pytest.mark.parametrize("vector", list(filter(has_streamed, vectors.load("normalisation"))))
def test_streamed_rows_match_vector(vector):
    batch = batch_of(vector["case"], streamed=True)
    check_rows(batch.rows, vector["expected"]["streamed"]["data"])
    assert batch.gradient_scale == pytest.approx(vector["expected"]["streamed"]["gradient_scale"], rel=0, abs=1e-6)
