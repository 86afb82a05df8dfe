"""Advantages as the vectors have them."""

import pytest

from pipeline.advantages import Batchwise, GroupCentered
from tests import vectors

ESTIMATORS = {"GroupCentered": GroupCentered, "Batchwise": Batchwise}


@pytest.mark.parametrize("vector", vectors.load("advantage"))
def test_advantages_match_vector(vector):
    options = dict(vector["estimator"])
    estimator = ESTIMATORS[options.pop("type")](**options)
    found = estimator.compute(vector["rewards"], vector["min_members"])
    assert [len(group) for group in found] == [len(group) for group in vector["expected"]]
    for group, expected in zip(found, vector["expected"], strict=True):
        assert group == pytest.approx(expected, rel=0, abs=1e-6)
