"""What every loss gets and gives: the tokens of a micro-batch in, a loss and ratios per token out."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from shm.errors import HeadwayError


class LossError(HeadwayError, ValueError):
    """A loss has no known name, options that it does not take, or is a user's and broke its rules."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The generated tokens of one micro-batch, row by row."""

    logprobs_M: Tensor  # log p, with gradient
    behaviour_logprobs_M: Tensor  # log q
    weights_M: Tensor  # advantage times scale
    scales_M: Tensor  # the normaliser; 0 where the token is masked or its trajectory dropped
    ages_M: Tensor  # int64: the learner's version minus the token's
    rows_M: Tensor  # int64: which row a token belongs to, from 0
    num_rows: int


class TokenLosses(NamedTuple):
    """What a loss says about each token. None: the loss forms no such thing."""

    losses_M: Tensor  # to be summed; its gradient is the update's
    ratios_M: Tensor | None = None  # the importance ratio, detached
    clipped_M: Tensor | None = None  # bool: the ratio's clip or cap decided
    capped_ratios_M: Tensor | None = None  # DecoupledPPO: min(prox / q, cap)


class Loss(Protocol):
    def __call__(self, tokens: TokenBatch) -> TokenLosses: ...
