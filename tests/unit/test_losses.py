"""Losses and their gradients against the formulas, token by token in plain Python floats."""

import math
import random

import pytest
import torch

from workers.losses import CISPO, LossError, build_loss, token_logprobs


def softmax(row, temperature):
    exponentials = [math.exp(value / temperature) for value in row]
    return [value / sum(exponentials) for value in exponentials]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("eps_max", [6.0, 1.2])
def test_cispo_and_its_gradient_follow_the_formula(temperature, eps_max):
    rng = random.Random(3)
    num_tokens, vocab = 40, 7
    scores = [[rng.gauss(0, 1.5) for _ in range(vocab)] for _ in range(num_tokens)]
    targets = [rng.randrange(vocab) for _ in range(num_tokens)]
    weights = [rng.gauss(0, 1) for _ in range(num_tokens)]
    behaviour = [rng.uniform(-6, -0.1) for _ in range(num_tokens)]

    logits = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    result = build_loss({"name": "CISPO", "eps_max": eps_max})(
        token_logprobs(logits, torch.tensor(targets), temperature),
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(weights, dtype=torch.float64),
    )
    result.losses_M.sum().backward()

    num_clipped = 0
    for t in range(num_tokens):
        shares = softmax(scores[t], temperature)
        logprob = math.log(shares[targets[t]])
        ratio = math.exp(logprob - behaviour[t])
        capped = min(ratio, eps_max)
        num_clipped += ratio >= eps_max
        assert result.ratios_M[t].item() == pytest.approx(ratio, rel=1e-12)
        assert result.clipped_M[t].item() == (ratio >= eps_max)
        assert result.losses_M[t].item() == pytest.approx(-weights[t] * capped * logprob, rel=1e-12)
        for token in range(vocab):
            # The ratio is a constant: d/dz of -w * capped * log p alone.
            slope = -weights[t] * capped * ((token == targets[t]) - shares[token]) / temperature
            assert logits.grad[t, token].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert 0 < num_clipped < num_tokens


def test_a_capped_token_still_has_a_gradient_and_an_infinite_ratio_is_capped():
    logprobs = torch.tensor([-0.1, -0.1], requires_grad=True)
    result = CISPO(eps_max=6.0)(logprobs, torch.tensor([-3.0, -200.0]), torch.tensor([2.0, -1.0]))
    result.losses_M.sum().backward()
    assert torch.equal(logprobs.grad, torch.tensor([-12.0, 6.0]))
    assert torch.isinf(result.ratios_M[1]) and result.losses_M.isfinite().all()


def test_zero_weight_gives_exactly_zero_loss_and_gradient():
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    result = CISPO()(logprobs, torch.tensor([-0.4, -300.0]), torch.zeros(2))
    result.losses_M.sum().backward()
    assert (result.losses_M == 0).all() and (logprobs.grad == 0).all()


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"name": "REINFORCE++"}, r"named 'REINFORCE\+\+'.*CISPO"),
        ({"eps_max": 6.0}, "named None"),
        ({"name": "CISPO", "low": 0.2}, "low"),
        ({"name": "CISPO", "eps_max": 0.0}, "eps_max is 0.0"),
        ({"name": "CISPO", "eps_max": math.nan}, "eps_max is nan"),
    ],
)
def test_an_unknown_loss_or_option_is_refused(fields, found):
    with pytest.raises(LossError, match=found):
        build_loss(fields)
    assert build_loss({"name": "CISPO"}) == CISPO(eps_max=6.0)
