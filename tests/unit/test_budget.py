"""The next request's tokens, rule by rule; `test_budget_vectors.py` has the breadth."""

import pytest

from pipeline.config import Budget
from pipeline.rollouts.budget import next_request_tokens, tokens_left


def request(budget: Budget, **changes) -> int:
    state = {"generated_tokens": 0, "context_tokens": 10, "turn_tokens": 0, "wrapped_up": False}
    return next_request_tokens(budget, **(state | changes))


def test_the_first_request_of_the_default_budget_is_one_whole_segment():
    assert request(Budget()) == 4096


def test_large_requests_are_multiples_of_256_and_small_ones_exact():
    assert request(Budget(segment_tokens=300)) == 256
    assert request(Budget(segment_tokens=255)) == 255


def test_the_tighter_of_both_budgets_counts():
    budget = Budget(max_generated_tokens=100, max_context_tokens=50)
    assert request(budget, generated_tokens=20, context_tokens=30) == 20
    assert request(budget, generated_tokens=95, context_tokens=30) == 5
    assert tokens_left(budget, generated_tokens=95, context_tokens=30) == 5


def test_the_reserve_is_kept_until_the_last_answer_was_asked_for():
    budget = Budget(max_generated_tokens=100, final_answer_reserve=30)
    assert request(budget, generated_tokens=20) == 50
    assert request(budget, generated_tokens=20, wrapped_up=True) == 80
    assert request(budget, generated_tokens=75) == 25  # within the reserve already: it is not taken off again


def test_the_environment_may_replace_the_turn_limit():
    budget = Budget(max_turn_tokens=40)
    assert request(budget, turn_tokens=15) == 25
    assert request(budget, turn_tokens=15, turn_cap=100) == 85


@pytest.mark.parametrize("state", [{"generated_tokens": 120}, {"context_tokens": 60}, {"turn_tokens": 41}], ids=str)
def test_a_budget_used_up_asks_for_nothing(state):
    budget = Budget(max_generated_tokens=100, max_context_tokens=50, max_turn_tokens=40)
    assert request(budget, **state) == 0
