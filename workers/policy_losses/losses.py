"""Policy losses by name. Each is a plain sum over generated tokens: advantage and normalisation are in the weights.

Letters: p learner's probability and q behaviour probability of a token, both of logits / sampling temperature;
rho = p / q; w weight, that is advantage times scale; sg stop gradient. M tokens of whole rows. All but a user's own
loss are homogeneous in the advantage, so they need the weight alone. A token of weight 0 has exactly zero loss and
gradient, whatever its ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from workers.policy_losses.custom_loss import CustomLoss
from workers.policy_losses.token_losses import Loss, LossError, TokenBatch, TokenLosses


def _differences(tokens: TokenBatch) -> Tensor:
    """log rho with gradient; 0 without one where nothing is weighed, so that 0 times infinity can't arise."""
    return torch.where(tokens.weights_M != 0, tokens.logprobs_M - tokens.behaviour_logprobs_M, 0.0)


def _ratios(tokens: TokenBatch) -> Tensor:
    return torch.exp(tokens.logprobs_M.detach() - tokens.behaviour_logprobs_M)


def _clipped_objective(differences_M: Tensor, weights_M: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(-min(r * w, clip(r, 1 - low, 1 + high) * w), where the clip decided), with r = exp(differences)."""
    ratios = torch.exp(differences_M.detach())
    above = (weights_M > 0) & (ratios > 1.0 + high)
    below = (weights_M < 0) & (ratios < 1.0 - low)
    clipped = above | below
    # A clipped token has no gradient. Its difference is taken out before exp, whose infinity would make that 0 a NaN.
    free = torch.exp(torch.where(clipped, 0.0, differences_M))
    bounds = torch.where(above, 1.0 + high, 1.0 - low)
    return -weights_M * torch.where(clipped, bounds, free), clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """-w * sg(min(rho, eps_max)) * log p: a capped importance weight, and a gradient from every token.

    eps_max is the cap itself, not 1 + eps, and there is no lower clip. MiniMax-M1 (arXiv:2506.13585), equation 4.
    """

    eps_max: float = 6.0

    def __post_init__(self) -> None:
        _check_numbers(self, above_zero=("eps_max",))

    def __call__(self, tokens: TokenBatch) -> TokenLosses:
        ratios = _ratios(tokens)
        losses = tokens.logprobs_M * (-tokens.weights_M * ratios.clamp(max=self.eps_max))
        return TokenLosses(losses, ratios, ratios >= self.eps_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO:
    """-min(rho * w, clip(rho, 1 - clip_low, 1 + clip_high) * w). Schulman et al. (arXiv:1707.06347), equation 7."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        _check_numbers(self, at_least_zero=("clip_low", "clip_high"))

    def __call__(self, tokens: TokenBatch) -> TokenLosses:
        losses, clipped = _clipped_objective(_differences(tokens), tokens.weights_M, self.clip_low, self.clip_high)
        return TokenLosses(losses, _ratios(tokens), clipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPPO:
    """PPO against the weights before the update (the proximal policy), with w' = w * min(prox / q, cap).

    One batch makes one step, so the proximal policy is the learner's own p, detached: no second pass. The ratio that
    is reported is prox / q. Hilton et al. (arXiv:2110.00641); the capped weight as in AReaL (arXiv:2505.24298).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    max_importance_weight: float = 5.0

    def __post_init__(self) -> None:
        _check_numbers(self, above_zero=("max_importance_weight",), at_least_zero=("clip_low", "clip_high"))

    def __call__(self, tokens: TokenBatch) -> TokenLosses:
        ratios = _ratios(tokens)
        capped = ratios.clamp(max=self.max_importance_weight)
        differences = tokens.logprobs_M - tokens.logprobs_M.detach()
        losses, _ = _clipped_objective(differences, tokens.weights_M * capped, self.clip_low, self.clip_high)
        return TokenLosses(losses, ratios, ratios >= self.max_importance_weight, capped)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """-w * rho: unbiased, and of unbounded variance, since nothing caps rho."""

    def __call__(self, tokens: TokenBatch) -> TokenLosses:
        ratios = _ratios(tokens)
        return TokenLosses(-tokens.weights_M * torch.exp(_differences(tokens)), ratios, torch.zeros_like(ratios).bool())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """-w * log p: no ratio, as if the learner's own policy had sampled the token."""

    def __call__(self, tokens: TokenBatch) -> TokenLosses:
        return TokenLosses(-tokens.weights_M * tokens.logprobs_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO:
    """PPO with one ratio per row: the geometric mean of its trained tokens' ratios, with gradient through it.

    Each token of the row weighs that ratio, so with normalize="sequence" and one run per trajectory the loss is
    equation 5 of Zheng et al. (arXiv:2507.18071); the default clips are theirs (section 5.1).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        _check_numbers(self, at_least_zero=("clip_low", "clip_high"))

    def __call__(self, tokens: TokenBatch) -> TokenLosses:
        trained = (tokens.scales_M != 0).to(tokens.logprobs_M.dtype)
        sums = tokens.logprobs_M.new_zeros(tokens.num_rows)
        counts = sums.index_add(0, tokens.rows_M, trained)
        differences = (tokens.logprobs_M - tokens.behaviour_logprobs_M) * trained
        means = sums.index_add(0, tokens.rows_M, differences) / counts.clamp(min=1.0)
        differences = means.index_select(0, tokens.rows_M)
        losses, clipped = _clipped_objective(differences, tokens.weights_M, self.clip_low, self.clip_high)
        return TokenLosses(losses, torch.exp(differences.detach()), clipped)


LOSSES: dict[str, Callable[..., Loss]] = {
    cls.__name__: cls for cls in (CISPO, PPO, DecoupledPPO, ImportanceSampling, PolicyGradient, GSPO, CustomLoss)
}


def build_loss(fields: dict[str, Any]) -> Loss:
    """The loss of a plain record, {"name": "CISPO", "eps_max": 6.0}; LossError for an unknown name or option."""
    options = dict(fields)
    name = options.pop("name", None)
    if name not in LOSSES:
        raise LossError(f"The loss is named {name!r}; known losses are {sorted(LOSSES)}. Name one of them.")
    try:
        return LOSSES[name](**options)
    except TypeError as error:
        raise LossError(
            f"The loss {name} does not take the options {options} ({error}); leave out what it lacks."
        ) from None


def _check_numbers(loss: Loss, above_zero: tuple[str, ...] = (), at_least_zero: tuple[str, ...] = ()) -> None:
    for name in above_zero + at_least_zero:
        value = getattr(loss, name)
        if not (isfinite(value) and (value > 0 or (value == 0 and name in at_least_zero))):
            least = "at least" if name in at_least_zero else "above"
            raise LossError(
                f"{type(loss).__name__}.{name} is {value!r}; it bounds the importance ratio, so give a number "
                f"{least} 0."
            )
