"""Losses and their gradients, computed in float32, against the formulas written plainly in float64."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from workers.policy_losses.loss_terms import kl_k3, token_entropies, token_logprobs
from workers.policy_losses.losses import LOSSES, PPO, LossError, build_loss
from workers.policy_losses.token_losses import TokenBatch

ROW_LENGTHS = [1, 9, 4, 16, 30]
VOCAB = 7


def make_tokens(logprobs, seed=3):
    """Tokens of rows of ROW_LENGTHS: ratios around 1, one advantage per row, a normaliser and some masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.repeat_interleave(torch.arange(len(ROW_LENGTHS)), torch.tensor(ROW_LENGTHS))
    num_tokens = len(rows)
    noise = torch.randn(num_tokens, generator=generator) * 0.6
    noise[::7] = 2.2  # ratios of 9: beyond every cap
    scales = (0.05 + torch.rand(num_tokens, generator=generator)) * (torch.rand(num_tokens, generator=generator) < 0.8)
    advantages = torch.tensor([1.5, -0.7, 0.9, -1.1, 0.4])[rows]
    return TokenBatch(
        logprobs_M=logprobs,
        behaviour_logprobs_M=(logprobs.detach().float() - noise).to(logprobs.dtype),
        weights_M=(advantages * scales).to(logprobs.dtype),
        scales_M=scales.to(logprobs.dtype),
        ages_M=torch.randint(0, 4, (num_tokens,), generator=generator),
        rows_M=rows,
        num_rows=len(ROW_LENGTHS),
    )


def make_logits(seed=7):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(ROW_LENGTHS), VOCAB, generator=generator) * 1.5
    return scores, torch.randint(0, VOCAB, (sum(ROW_LENGTHS),), generator=generator)


# --- the references: float64, as one reads the formulas ------------------------------------------------------------


def cispo(logp, q, w, scales, rows, *, eps_max=6.0):
    return -w * (logp - q).exp().clamp(max=eps_max).detach() * logp


def ppo(logp, q, w, scales, rows, *, clip_low=0.2, clip_high=0.2):
    ratio = (logp - q).exp()
    return -torch.minimum(ratio * w, ratio.clamp(1 - clip_low, 1 + clip_high) * w)


def decoupled_ppo(logp, q, w, scales, rows, *, clip_low=0.2, clip_high=0.2, max_importance_weight=5.0):
    proximal = logp.detach()
    w = w * (proximal - q).exp().clamp(max=max_importance_weight)
    return ppo(logp, proximal, w, scales, rows, clip_low=clip_low, clip_high=clip_high)


def importance_sampling(logp, q, w, scales, rows):
    return -w * (logp - q).exp()


def policy_gradient(logp, q, w, scales, rows):
    return -w * logp


def gspo(logp, q, w, scales, rows, *, clip_low=3e-4, clip_high=4e-4):
    losses = torch.zeros_like(logp)
    for row in rows.unique():
        own, trained = rows == row, (rows == row) & (scales != 0)
        ratio = (logp - q)[trained].mean().exp() if trained.any() else torch.tensor(1.0, dtype=logp.dtype)
        losses[own] = -torch.minimum(ratio * w[own], ratio.clamp(1 - clip_low, 1 + clip_high) * w[own])
    return losses


def custom_loss(logprobs, behaviour_logprobs, advantages, mask, ages):
    """What a user could write: their own discount by age, and a penalty of all trained tokens."""
    ratios = (logprobs - behaviour_logprobs).exp().detach()
    return -advantages * ratios * logprobs * 0.5**ages + 0.1 * logprobs**2


CASES = [
    (cispo, {"name": "CISPO", "eps_max": 6.0}),
    (cispo, {"name": "CISPO", "eps_max": 1.2}),
    (ppo, {"name": "PPO"}),
    (ppo, {"name": "PPO", "clip_low": 0.0, "clip_high": 0.5}),
    (decoupled_ppo, {"name": "DecoupledPPO"}),
    (decoupled_ppo, {"name": "DecoupledPPO", "max_importance_weight": 1.1}),
    (importance_sampling, {"name": "ImportanceSampling"}),
    (policy_gradient, {"name": "PolicyGradient"}),
    (gspo, {"name": "GSPO"}),
    (gspo, {"name": "GSPO", "clip_low": 0.1, "clip_high": 0.2}),
]


def assert_close(found, expected):
    """To 1e-6 of each number, and of the largest one where a sum of several cancels."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("reference", "record"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_loss_and_gradient_are_the_references(reference, record, temperature):
    scores, targets = make_logits()
    logits = scores.clone().requires_grad_(True)
    tokens = make_tokens(token_logprobs(logits, targets, temperature))
    found = build_loss(record)(tokens)
    found.losses_M.sum().backward()

    exact = scores.double().requires_grad_(True)
    logp = torch.log_softmax(exact / temperature, dim=-1).gather(1, targets[:, None]).squeeze(1)
    options = {name: value for name, value in record.items() if name != "name"}
    inputs = (tokens.behaviour_logprobs_M.double(), tokens.weights_M.double(), tokens.scales_M.double())
    losses = reference(logp, *inputs, tokens.rows_M, **options)
    losses.sum().backward()
    assert_close(found.losses_M.detach(), losses.detach())
    assert_close(logits.grad, exact.grad)
    assert found.losses_M.dtype == logits.grad.dtype == torch.float32


@pytest.mark.parametrize("record", [record for _, record in CASES], ids=str)
def test_ratio_and_clip_are_reported_where_the_loss_forms_them(record):
    scores, targets = make_logits()
    tokens = make_tokens(token_logprobs(scores, targets, 1.0))
    found = build_loss(record)(tokens)
    if record["name"] == "PolicyGradient":
        assert found.ratios_M is None and found.clipped_M is None
        return
    ratios = (tokens.logprobs_M - tokens.behaviour_logprobs_M).exp()
    if record["name"] == "GSPO":
        for row in range(tokens.num_rows):
            own = (tokens.rows_M == row) & (tokens.scales_M != 0)
            mean = ratios[own].log().mean().exp() if own.any() else torch.tensor(1.0)
            torch.testing.assert_close(found.ratios_M[tokens.rows_M == row], mean.expand(ROW_LENGTHS[row]))
    else:
        torch.testing.assert_close(found.ratios_M, ratios)
    share = found.clipped_M.float().mean().item()
    assert share < 1 and (share == 0) == (record["name"] == "ImportanceSampling")


@pytest.mark.parametrize("name", ["PPO", "GSPO"])
def test_clip_counts_only_where_it_takes_the_gradient_away(name):
    """A ratio outside the range still has its gradient when the advantage pulls it back."""
    q = torch.zeros(4)
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    weights = torch.tensor([1.0, -1.0, 1.0, -1.0])
    tokens = TokenBatch(logp, q, weights, torch.ones(4), torch.zeros(4), torch.arange(4), 4)
    found = build_loss({"name": name, "clip_low": 0.2, "clip_high": 0.2})(tokens)
    found.losses_M.sum().backward()
    assert found.clipped_M.tolist() == [True, False, False, True]
    assert (logp.grad != 0).tolist() == [False, True, True, False]


def test_a_capped_token_still_has_a_gradient_and_an_infinite_ratio_is_capped():
    logprobs = torch.tensor([-0.1, -0.1], requires_grad=True)
    tokens = TokenBatch(
        logprobs,
        torch.tensor([-3.0, -200.0]),
        torch.tensor([2.0, -1.0]),
        torch.ones(2),
        torch.zeros(2),
        torch.arange(2),
        2,
    )
    result = build_loss({"name": "CISPO"})(tokens)
    result.losses_M.sum().backward()
    assert torch.equal(logprobs.grad, torch.tensor([-12.0, 6.0]))
    assert torch.isinf(result.ratios_M[1]) and result.losses_M.isfinite().all()


def test_a_clipped_infinite_ratio_has_exactly_zero_gradient():
    logprobs = torch.tensor([-0.1], requires_grad=True)
    tokens = TokenBatch(
        logprobs, torch.tensor([-300.0]), torch.ones(1), torch.ones(1), torch.zeros(1), torch.arange(1), 1
    )
    result = PPO()(tokens)
    result.losses_M.sum().backward()
    assert result.losses_M.item() == pytest.approx(-1.2) and logprobs.grad.item() == 0.0


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"CustomLoss"}))
def test_zero_weight_gives_exactly_zero_loss_and_gradient(name):
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    zeros = torch.zeros(2)
    tokens = TokenBatch(logprobs, torch.tensor([-0.4, -300.0]), zeros, zeros, zeros, torch.arange(2), 2)
    result = build_loss({"name": name})(tokens)
    result.losses_M.sum().backward()
    assert (result.losses_M == 0).all() and (logprobs.grad == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_entropy_and_its_gradient_are_exact(temperature):
    scores, _ = make_logits()
    logits, exact = scores.clone().requires_grad_(True), scores.double().requires_grad_(True)
    found = token_entropies(logits, temperature)
    found.sum().backward()
    shares = torch.softmax(exact / temperature, dim=-1)
    expected = -(shares * shares.log()).sum(dim=-1)
    expected.sum().backward()
    assert_close(found.detach(), expected.detach())
    assert_close(logits.grad, exact.grad)


def test_entropy_of_a_certain_token_is_zero():
    logits = torch.tensor([[0.0, -math.inf, -math.inf]], requires_grad=True)
    entropy = token_entropies(logits, 1.0)
    entropy.sum().backward()
    assert entropy.item() == 0.0 and (logits.grad == 0).all()


def test_kl_estimate_and_its_gradient():
    scores, targets = make_logits()
    other, _ = make_logits(seed=8)
    reference = token_logprobs(other, targets, 1.0)
    logits, exact = scores.clone().requires_grad_(True), scores.double().requires_grad_(True)
    found = kl_k3(token_logprobs(logits, targets, 1.0), reference)
    found.sum().backward()
    logp = torch.log_softmax(exact, dim=-1).gather(1, targets[:, None]).squeeze(1)
    ratio = (reference.double() - logp).exp()
    expected = ratio - 1 - ratio.log()
    expected.sum().backward()
    assert_close(found.detach(), expected.detach())
    assert_close(logits.grad, exact.grad)
    assert (found >= 0).all()


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"name": "REINFORCE++"}, r"named 'REINFORCE\+\+'.*CISPO"),
        ({"eps_max": 6.0}, "named None"),
        ({"name": "CISPO", "low": 0.2}, "low"),
        ({"name": "CISPO", "eps_max": 0.0}, "eps_max is 0.0"),
        ({"name": "CISPO", "eps_max": math.nan}, "eps_max is nan"),
        ({"name": "PPO", "clip_low": -0.1}, "clip_low is -0.1.*at least 0"),
        ({"name": "DecoupledPPO", "max_importance_weight": 0.0}, "max_importance_weight is 0.0.*above 0"),
    ],
)
def test_an_unknown_loss_or_option_is_refused(fields, found):
    with pytest.raises(LossError, match=found):
        build_loss(fields)


# --- a user's own ---------------------------------------------------------------------------------------------------


def custom(function, monkeypatch):
    monkeypatch.setattr(f"{__name__}.candidate", function, raising=False)
    return build_loss({"name": "CustomLoss", "path": f"{__name__}:candidate"})


def test_a_users_loss_is_normalised_and_masked(monkeypatch):
    scores, targets = make_logits()
    logits = scores.clone().requires_grad_(True)
    tokens = make_tokens(token_logprobs(logits, targets, 1.0))
    found = custom(custom_loss, monkeypatch)(tokens)
    found.losses_M.sum().backward()

    exact = scores.double().requires_grad_(True)
    logp = torch.log_softmax(exact, dim=-1).gather(1, targets[:, None]).squeeze(1)
    scales = tokens.scales_M.double()
    mask = scales != 0
    advantages = torch.where(mask, tokens.weights_M.double() / scales.clamp(min=1e-9), 0.0)
    own = custom_loss(logp, tokens.behaviour_logprobs_M.double(), advantages, mask, tokens.ages_M)
    (own * scales).sum().backward()
    assert_close(found.losses_M.detach(), (own * scales).detach())
    assert_close(logits.grad, exact.grad)
    assert found.ratios_M is not None and found.clipped_M is None


def test_a_users_loss_sees_each_tokens_advantage_mask_and_age(monkeypatch):
    seen = {}

    def look(logprobs, behaviour_logprobs, advantages, mask, ages):
        seen.update(advantages=advantages, mask=mask, ages=ages)
        return logprobs * 0

    scores, targets = make_logits()
    tokens = make_tokens(token_logprobs(scores.requires_grad_(True), targets, 1.0))
    custom(look, monkeypatch)(tokens)
    wanted = torch.tensor([1.5, -0.7, 0.9, -1.1, 0.4])[tokens.rows_M]
    assert torch.equal(seen["mask"], tokens.scales_M != 0) and 0 < seen["mask"].sum() < len(wanted)
    torch.testing.assert_close(seen["advantages"], torch.where(seen["mask"], wanted, 0.0), rtol=3e-7, atol=0)
    assert torch.equal(seen["ages"], tokens.ages_M) and seen["ages"].dtype == torch.int64


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda p, q, a, m, s: 3.0, "returned float; it must return a loss for each token, of shape .60,.*as a tensor"),
        (lambda p, q, a, m, s: (-p * a).sum(), "returned shape .*normalize does"),
        (lambda p, q, a, m, s: -p.double() * a, "dtype torch.float64; it must .* torch.float32"),
        (lambda p, q, a, m, s: -p.detach() * a, "without gradient; it must be differentiable"),
        (lambda p, q, a, m, s: p.no_such_method(), "raised AttributeError: .*no_such_method"),
        (lambda p, q: -p, "raised TypeError"),
        (lambda p, q, a, m, s: sys.exit(3), "raised SystemExit: 3."),
        (lambda p, q, a, m, s: [-p * a, (-p * a).sum().backward()][0], "called backward; the learner does"),
    ],
)
def test_a_users_loss_that_breaks_its_rules_is_named(function, found, monkeypatch):
    scores, targets = make_logits()
    tokens = make_tokens(token_logprobs(scores.requires_grad_(True), targets, 1.0))
    with pytest.raises(LossError, match=rf"^The loss {__name__}:candidate .*{found}"):
        custom(function, monkeypatch)(tokens)


def test_a_users_loss_may_overwrite_what_it_gets(monkeypatch):
    def plain(logprobs, behaviour_logprobs, advantages, mask, ages):
        return -logprobs.clamp(min=-3.0) * advantages

    def overwriting(logprobs, behaviour_logprobs, advantages, mask, ages):
        losses = -logprobs.clamp_(min=-3.0) * advantages.clone()
        for argument in (behaviour_logprobs, advantages, mask, ages):
            argument.zero_()
        return losses

    gradients, results = [], []
    for function in (plain, overwriting):
        scores, targets = make_logits()
        tokens = make_tokens(token_logprobs(scores.requires_grad_(True), targets, 1.0))
        results.append(custom(function, monkeypatch)(tokens))
        results[-1].losses_M.sum().backward()
        gradients.append(scores.grad)
        assert tokens.behaviour_logprobs_M.all() and tokens.ages_M.any()
    assert (tokens.logprobs_M < -3.0).any()  # or clamp would change nothing
    assert torch.equal(*gradients) and gradients[0].any()
    assert torch.equal(results[0].losses_M, results[1].losses_M)
    assert torch.equal(results[0].ratios_M, results[1].ratios_M)


def test_what_a_users_loss_raises_is_told_in_one_line(monkeypatch):
    def broken(p, q, a, m, s):
        raise ValueError("first\nsecond")

    scores, targets = make_logits()
    with pytest.raises(LossError, match="raised ValueError: first second.$"):
        custom(broken, monkeypatch)(make_tokens(token_logprobs(scores.requires_grad_(True), targets, 1.0)))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("no_such_module:f", "can't be imported: there is no module no_such_module"),
        ("math:no_such", "can't be imported: math .* has no 'no_such'"),
        ("math:pi", "is float; it must be a function"),
    ],
)
def test_a_users_loss_that_is_none_is_refused_at_the_start(path, found):
    with pytest.raises(LossError, match=found):
        build_loss({"name": "CustomLoss", "path": path})


def test_a_users_loss_may_lie_beside_the_script(tmp_path):
    (tmp_path / "losses_beside_the_script.py").write_text("def plain(p, q, a, m, s):\n    return -p * a\n")
    record = {"name": "CustomLoss", "path": "losses_beside_the_script:plain", "sys_path": [str(tmp_path)]}
    scores, targets = make_logits()
    tokens = make_tokens(token_logprobs(scores, targets, 1.0))
    found, expected = build_loss(record)(tokens), build_loss({"name": "PolicyGradient"})(tokens)
    torch.testing.assert_close(found.losses_M, expected.losses_M)
    masked = replace(tokens, scales_M=torch.zeros_like(tokens.scales_M), weights_M=torch.zeros_like(tokens.weights_M))
    assert (build_loss(record)(masked).losses_M == 0).all()
