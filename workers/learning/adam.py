"""AdamW over one flat buffer of weights: torch's fused kernel, called without `torch.optim`.

The class `torch.optim.AdamW` calls the same kernel, but making one loads torch's compiler (dynamo, sympy): 1.7 of the
4.4 seconds of a learner's start on the machine where that was measured.
"""

import torch
from torch import Tensor


class Adam:
    """Adam with bias correction and decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    weights, gradients: float32 [N], updated in place. Only the first `num_decayed` elements decay. State: `mean` and
    `square`, the running averages of gradient and squared gradient, float32 [N], and `num_steps`.
    """

    def __init__(
        self,
        weights: Tensor,
        gradients: Tensor,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        num_decayed: int,
    ) -> None:
        self.mean = torch.zeros_like(weights)
        self.square = torch.zeros_like(weights)
        self.num_steps = torch.zeros((), dtype=torch.float32, device=weights.device)
        self._options = {"beta1": beta1, "beta2": beta2, "eps": eps, "amsgrad": False, "maximize": False}
        tensors = (weights, gradients, self.mean, self.square)
        # (weights, gradients, mean, square) of each part, and its decay. The parts are views of the flat buffers.
        self._parts = [
            ([tensor[part] for tensor in tensors], decay)
            for part, decay in ((slice(0, num_decayed), weight_decay), (slice(num_decayed, None), 0.0))
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of the weights with the gradients as they are now."""
        self.num_steps += 1
        for (weights, gradients, mean, square), decay in self._parts:
            torch._fused_adamw_(
                [weights],
                [gradients],
                [mean],
                [square],
                [],
                [self.num_steps],
                lr=lr,
                weight_decay=decay,
                **self._options,
            )

    def state(self) -> dict[str, Tensor]:
        """The state by name, not copied."""
        return {"mean": self.mean, "square": self.square, "num_steps": self.num_steps}
