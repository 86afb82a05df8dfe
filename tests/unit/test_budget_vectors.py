"""Tokens of the next request as the vectors have them."""

import pytest

from pipeline.config import Budget
from pipeline.rollouts.budget import next_request_tokens
from tests import vectors


@pytest.mark.parametrize("vector", vectors.load("budget"))
def test_next_request_matches_vector(vector):
    state = vector["state"]
    found = next_request_tokens(
        Budget(**vector["budget"]),
        generated_tokens=state["generated_tokens"],
        context_tokens=state["context_tokens"],
        turn_tokens=state["turn_tokens"],
        wrapped_up=state["wrap_up"],
        turn_cap=state["turn_cap_override"],
    )
    assert found == vector["expected"]
