"""A user's own loss, imported by path: the only code of a user that the learner runs.

`f(logprobs, behaviour_logprobs, advantages, mask, ages) -> per-token loss` sees the generated tokens of one
micro-batch [M], rows end to end: log-probs with gradient, and detached float32 behaviour log-probs and advantages, bool
mask (False: not trained) and int64 ages; all are copies. What it returns [M] is multiplied with the normaliser and
summed; masked tokens don't count.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.errors import ImportPathError
from workers.import_path import find_object
from workers.policy_losses.token_losses import LossError, TokenBatch, TokenLosses

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class CustomLoss:
    """`path` is `module:function`; sys_path: where else its module may lie. LossError if it can't be imported."""

    def __init__(self, *, path: str, sys_path: Sequence[str] = ()) -> None:
        self._path = path
        self._function = _load(path, sys_path)

    def __call__(self, tokens: TokenBatch) -> TokenLosses:
        """LossError for a result that is no per-token loss. That its values are finite is checked with the batch's."""
        mask = tokens.scales_M != 0
        # weight = advantage * scale, so the quotient is the advantage but for the last bit of a float32.
        advantages = torch.where(mask, tokens.weights_M / torch.where(mask, tokens.scales_M, 1.0), 0.0)
        # Copies, so that a function may overwrite what it gets; a `backward` of its own leaves its trace in this one.
        logprobs = tokens.logprobs_M.clone()
        if logprobs.requires_grad:
            logprobs.retain_grad()
        try:
            found = self._function(
                logprobs, tokens.behaviour_logprobs_M.clone(), advantages, mask.clone(), tokens.ages_M.clone()
            )
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's code may raise anything
            said = " ".join(str(error).split())
            raise LossError(f"The loss {self._path} raised {type(error).__name__}: {said}.") from error
        if logprobs.grad is not None:
            raise LossError(
                f"The loss {self._path} called backward; the learner does, once for all losses of a micro-batch. "
                "Return the loss of each token with its gradient."
            )
        self._check(found, tokens.logprobs_M)
        losses = torch.where(mask, found, 0.0) * tokens.scales_M
        return TokenLosses(losses, torch.exp(tokens.logprobs_M.detach() - tokens.behaviour_logprobs_M))

    def _check(self, found: Any, logprobs_M: Tensor) -> None:
        shape, dtype = tuple(logprobs_M.shape), logprobs_M.dtype
        wanted = f"it must return a loss for each token, of shape {shape} and dtype {dtype}"
        if not isinstance(found, Tensor):
            raise LossError(f"The loss {self._path} returned {type(found).__name__}; {wanted}, as a tensor.")
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise LossError(
                f"The loss {self._path} returned shape {tuple(found.shape)} and dtype {found.dtype}; {wanted}. "
                "Don't sum or average it: normalize does."
            )
        if logprobs_M.requires_grad and not found.requires_grad:
            raise LossError(
                f"The loss {self._path} returned a tensor without gradient; it must be differentiable with respect to "
                "logprobs. Don't detach them, and compute the loss from them."
            )


def _load(path: str, sys_path: Sequence[str]) -> LossFunction:
    sys.path += [entry for entry in sys_path if entry not in sys.path]
    try:
        found = find_object(path, "loss", "my_losses:clipped")
    except ImportPathError as error:
        raise LossError(str(error)) from error
    if not callable(found):
        raise LossError(f"The loss {path} is {type(found).__name__}; it must be a function.")
    return found
