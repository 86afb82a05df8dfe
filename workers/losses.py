"""Policy losses by name. Each is a plain sum over generated tokens: advantage and normalisation are in the weights.

Letters: p learner's probability and q behaviour probability of a token, both of logits / sampling temperature;
rho = p / q; w weight; sg stop gradient. M tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shm.errors import HeadwayError


class LossError(HeadwayError, ValueError):
    """A loss has no known name, or options that it does not take."""


class TokenLosses(NamedTuple):
    """What a loss says about each token."""

    losses_M: Tensor  # to be summed; its gradient is the update's
    ratios_M: Tensor  # rho, detached
    clipped_M: Tensor  # bool: rho reached the cap


# loss(logprobs [M] with gradient, behaviour_logprobs [M], weights [M]) -> TokenLosses
Loss = Callable[[Tensor, Tensor, Tensor], TokenLosses]


def token_logprobs(logits_MV: Tensor, targets_M: Tensor, temperature: float) -> Tensor:
    """Log-probs [M] of `targets` [M] int64 under softmax(logits / temperature), in the logits' dtype."""
    scaled = logits_MV if temperature == 1.0 else logits_MV / temperature
    return -F.cross_entropy(scaled, targets_M, reduction="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """-w * sg(min(rho, eps_max)) * log p: a capped importance weight, and a gradient from every token.

    eps_max is the cap itself, not 1 + eps, and there is no lower clip. MiniMax-M1 (arXiv:2506.13585), equation 4.
    """

    eps_max: float = 6.0

    def __post_init__(self) -> None:
        if not (isfinite(self.eps_max) and self.eps_max > 0):
            raise LossError(
                f"CISPO.eps_max is {self.eps_max!r}; it caps the importance ratio, so give a number above 0."
            )

    def __call__(self, logprobs_M: Tensor, behaviour_logprobs_M: Tensor, weights_M: Tensor) -> TokenLosses:
        ratios = torch.exp(logprobs_M.detach() - behaviour_logprobs_M)
        losses = logprobs_M * (-weights_M * ratios.clamp(max=self.eps_max))
        return TokenLosses(losses, ratios, ratios >= self.eps_max)


LOSSES: dict[str, Callable[..., Loss]] = {"CISPO": CISPO}


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
