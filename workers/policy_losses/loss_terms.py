"""What a loss is made of: log-probs of tokens, the entropy of their distributions, the distance to other weights.

Letters: M tokens, V vocabulary; p the learner's probability, of logits / temperature.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def token_logprobs(logits_MV: Tensor, targets_M: Tensor, temperature: float) -> Tensor:
    """Log-probs [M] of `targets` [M] int64 under softmax(logits / temperature), in the logits' dtype."""
    scaled = logits_MV if temperature == 1.0 else logits_MV / temperature
    return -F.cross_entropy(scaled, targets_M, reduction="none")


def token_entropies(logits_MV: Tensor, temperature: float) -> Tensor:
    """Entropy [M], in nats, of softmax(logits / temperature): exact, summed over the vocabulary, with gradient."""
    logprobs = torch.log_softmax(logits_MV / temperature, dim=-1)
    # A token of probability 0 (a logit of -inf) adds nothing: the limit of -p log p.
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)).sum(dim=-1)


def kl_k3(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """r - 1 - log r with r = reference / p: an estimate of KL(p || reference) on tokens of p that is never negative.

    Schulman, "Approximating KL divergence" (2020); with gradient through p, as in GRPO (arXiv:2402.03300, equation 4).
    """
    log_ratios = reference_logprobs_M - logprobs_M
    return torch.expm1(log_ratios) - log_ratios
