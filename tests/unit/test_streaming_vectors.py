"""Chunks of a synchronous batch as the vectors have them: which groups, when, with what weights and what factor."""

import numpy as np
import pytest

from pipeline.advantages import GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.overlap import StreamedBatch
from pipeline.config import ForwardBackwardBatch, Truncation
from pipeline.trajectory import Group, Span, Trajectory
from tests import vectors


def make_group(index: int, members: list) -> Group:
    group = Group(group=index, row=index, version=0)
    for member, given in enumerate(members):
        generated = [1] * given["generated"]
        spans = [Span("prompt", [1] * given["prompt"]), Span("generated", generated, 0, 0, [-1.0] * len(generated))]
        group.trajectories.append(
            Trajectory(index, member, index, spans, float(given["reward"]), truncated=given["truncated"])
        )
    return group


@pytest.mark.parametrize("vector", vectors.load("streaming"))
def test_chunks_match_vector(vector):
    params, expected = vector["params"], vector["expected"]
    rules = BatchRules(
        advantage=GroupCentered(standardize=params["standardize"]),
        normalize=params["normalize"],
        truncation=Truncation(train=params["truncation"]),
        min_members=params["min_members"],
        streamed=True,
    )
    thresholds = ForwardBackwardBatch(min_sequences=params["min_sequences"], min_tokens=params["min_tokens"])
    streamed = StreamedBatch(thresholds, 0, rules)
    groups = [make_group(index, group["members"]) for index, group in enumerate(vector["groups"])]
    order = sorted(range(len(groups)), key=lambda group: (vector["groups"][group]["ready"], group))
    assert order == expected["ready_order"]

    found = []
    for arrivals, group in enumerate(order, 1):
        found += [(arrivals, rows) for rows in streamed.add(groups[group])]
    rest, batch = streamed.flush(groups)
    found += [(len(order), rows) for rows in rest]

    assert len(found) == len(expected["chunks"]) == expected["backward_chunks"]
    for index, ((arrivals, rows), chunk) in enumerate(zip(found, expected["chunks"], strict=True)):
        assert arrivals == chunk["after_groups_ready"]
        assert (index == 0) == chunk["zero_gradients"]
        assert list(zip(rows.groups.tolist(), rows.members.tolist(), strict=True)) == list(map(tuple, chunk["members"]))
        assert rows.num_tokens == chunk["tokens"]
        sums = np.add.reduceat(rows.weights, np.cumsum(rows.lengths) - rows.lengths)
        np.testing.assert_allclose(sums, chunk["weight_sums"], rtol=0, atol=1e-5)
    assert (batch.rows.num_rows > 0) == expected["updated"]
    if expected["updated"]:
        assert batch.gradient_scale == pytest.approx(expected["gradient_scale"], rel=0, abs=1e-6)
