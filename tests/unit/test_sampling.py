"""Sampling: the drawn distribution, its filters and the log-prob that goes with a token."""

import numpy as np
import pytest
import torch

from workers.generation.sampling import sample


def evenly_spaced(num: int) -> torch.Tensor:
    """Uniforms that stand for their distribution: the middle of each of `num` equal parts of [0, 1)."""
    return (torch.arange(num, dtype=torch.float64) + 0.5) / num


def frequencies(logits: torch.Tensor, num: int, **options: float) -> torch.Tensor:
    tokens, _ = sample(logits.expand(num, -1).contiguous(), evenly_spaced(num), **options)
    return torch.bincount(tokens, minlength=len(logits)) / num


def test_tokens_follow_the_softmax_at_the_temperature():
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5])
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, dim=-1)
        drawn = frequencies(logits, 4000, temperature=temperature)
        assert torch.allclose(drawn, expected, atol=1e-3)


def test_logprob_is_that_of_the_full_distribution_even_when_filtered():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(16, 40, generator=generator) * 3
    noise = torch.rand(16, generator=generator, dtype=torch.float64)
    for options in ({}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.9}):
        tokens, logprobs = sample(logits, noise, 0.7, **options)
        reference = torch.log_softmax(logits.double() / 0.7, dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        assert logprobs.dtype == torch.float32 and tokens.dtype == torch.int64
        assert torch.allclose(logprobs.double(), reference, atol=1e-6)


def test_top_k_and_top_p_keep_what_they_say():
    probs = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    logits = probs.log()
    assert torch.allclose(frequencies(logits, 6500, top_k=2), torch.tensor([0, 0.4, 0, 0.25, 0]) / 0.65, atol=1e-3)
    # 0.4 + 0.25 < 0.7 <= 0.4 + 0.25 + 0.2
    kept = torch.tensor([0, 0.4, 0, 0.25, 0.2]) / 0.85
    assert torch.allclose(frequencies(logits, 8500, top_p=0.7), kept, atol=1e-3)
    assert torch.allclose(
        frequencies(logits, 6500, top_p=0.7, top_k=2), torch.tensor([0, 0.4, 0, 0.25, 0]) / 0.65, atol=1e-3
    )


def test_a_tiny_top_p_still_keeps_the_most_likely_token():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, _ = sample(logits, torch.tensor([0.99], dtype=torch.float64), top_p=1e-9)
    assert tokens.item() == 1


def test_equal_logits_rank_by_token_id_under_top_k():
    drawn = frequencies(torch.zeros(6), 3000, top_k=3)
    assert torch.allclose(drawn, torch.tensor([1, 1, 1, 0, 0, 0]) / 3, atol=1e-3)


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_token_of_zero_probability_is_never_drawn(noise):
    forbidden = float("-inf")
    rows = torch.tensor(
        [
            [forbidden, 0.0, forbidden, 0.0, forbidden],
            [0.0, forbidden, forbidden, forbidden, forbidden],
            [forbidden, forbidden, forbidden, forbidden, 0.0],
            [-200.0, 0.0, -200.0, 0.0, -200.0],  # float32 underflows to 0
        ]
    )
    tokens, logprobs = sample(rows, torch.full((4,), noise, dtype=torch.float64))
    assert tokens[0].item() in (1, 3) and tokens[3].item() in (1, 3)
    assert tokens[1:3].tolist() == [0, 4]
    assert torch.isfinite(logprobs).all()


def test_temperature_zero_takes_the_most_likely_token():
    tokens, logprobs = sample(torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([0.999], dtype=torch.float64), 0.0)
    assert tokens.tolist() == [1] and logprobs.tolist() == [0.0]


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 50, generator=generator) * 4
    noise = torch.rand(32, generator=generator, dtype=torch.float64)
    together, _ = sample(logits, noise, 1.0, 0.9, 20)
    alone = [sample(logits[i : i + 1], noise[i : i + 1], 1.0, 0.9, 20)[0].item() for i in range(32)]
    assert together.tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_show_as_a_broken_logprob(temperature):
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    _, logprobs = sample(logits, torch.tensor([0.3, 0.3], dtype=torch.float64), temperature)
    assert np.isfinite(logprobs[0].item()) and not np.isfinite(logprobs[1].item())
