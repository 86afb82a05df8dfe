"""How many tokens a trajectory's next request may ask for, within the user's `Budget`."""

from pipeline.config import Budget

# Requests of this size or more are cut to a multiple of it, so that the sampler meets few distinct lengths.
REQUEST_MULTIPLE = 256


def tokens_left(budget: Budget, generated_tokens: int, context_tokens: int) -> int:
    """Tokens that the trajectory may still generate: over all its runs, and into the context of its current run."""
    return min(budget.max_generated_tokens - generated_tokens, budget.max_context_tokens - context_tokens)


def next_request_tokens(
    budget: Budget,
    *,
    generated_tokens: int,
    context_tokens: int,
    turn_tokens: int,
    wrapped_up: bool,
    turn_cap: int | None = None,
) -> int:
    """Tokens of the next request; 0 if a budget is used up.

    turn_tokens: generated so far in the open turn. wrapped_up: the last answer was asked for, and may use its reserve.
    turn_cap: the environment's limit for this turn, in place of `budget.max_turn_tokens`.
    """
    tokens = tokens_left(budget, generated_tokens, context_tokens)
    if not wrapped_up and tokens > budget.final_answer_reserve:
        tokens -= budget.final_answer_reserve
    cap = budget.max_turn_tokens if turn_cap is None else turn_cap
    if cap is not None:
        tokens = min(tokens, cap - turn_tokens)
    tokens = min(tokens, budget.segment_tokens)
    if tokens >= REQUEST_MULTIPLE:
        tokens -= tokens % REQUEST_MULTIPLE
    return max(0, tokens)
