"""The cosine learning rate as the vectors have it."""

import pytest

from pipeline.training.learning_rate import cosine_multiplier
from tests import vectors


@pytest.mark.parametrize("vector", vectors.load("cosine"))
def test_multiplier_matches_vector(vector):
    options = {name: vector[name] for name in ("steps", "warmup", "floor")}
    found = [cosine_multiplier(batch, **options) for batch in range(vector["steps"])]
    assert found == pytest.approx(vector["expected"], rel=0, abs=1e-6)
