"""Tokens and behaviour log-probs from logits, with noise that belongs to the trajectory and not to the batch.

Each token takes one uniform number, a hash of (seed, group, member, position): whatever else is decoded beside it,
however its turn is cut into requests, and whichever sampler does it, a trajectory meets the same noise. Shape
letters: B sequences, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): increment and finaliser.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_INCREMENT = np.uint64(_GOLDEN)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = (np.uint64(bits) for bits in (30, 27, 31, 11))
_UNIT = 2.0**-53  # a float64 holds 53 bits of the hash


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of uint64 in which each input bit changes about half of the output bits."""
    state = (state ^ (state >> _SHIFT_30)) * _MULTIPLY_1
    state = (state ^ (state >> _SHIFT_27)) * _MULTIPLY_2
    return state ^ (state >> _SHIFT_31)


def _as_words(values: np.ndarray) -> np.ndarray:
    """Integers -> uint64, negative ones (evaluations' groups) by two's complement."""
    return np.asarray(values, dtype=np.int64).view(np.uint64)


def stream_keys(seed: int, groups: np.ndarray, members: np.ndarray) -> np.ndarray:
    """groups, members int [B] -> uint64 [B]: the start of each trajectory's stream. Any integers, any seed."""
    start = _mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))
    of_group = _mix(start + (_as_words(groups) + np.uint64(1)) * _INCREMENT)
    return _mix(of_group + (_as_words(members) + np.uint64(1)) * _INCREMENT)


def stream_uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """keys uint64 [B] of `stream_keys`, positions int [B] -> float64 [B] in [0, 1)."""
    hashed = _mix(keys + (_as_words(positions) + np.uint64(1)) * _INCREMENT)
    return (hashed >> _SHIFT_11) * _UNIT


def uniforms(seed: int, groups: np.ndarray, members: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, group, member, generated position); a function of these four alone."""
    return stream_uniforms(stream_keys(seed, groups, members), positions)


def sample(
    logits_BV: Tensor, uniforms_B: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """logits [B, V] float32, uniforms [B] float64 in [0, 1) -> tokens [B] int64, behaviour log-probs [B] float32.

    Inverts the cumulative distribution, in vocabulary order, at the row's uniform; a token of zero probability is never
    taken. `top_k` (0: off) and `top_p` (1: off) narrow what can be drawn, but the log-prob is always that of the *full*
    distribution, log_softmax(logits / temperature): it is what the learner computes too. Temperature 0 takes the most
    likely token, whose log-prob is then 0, the limit. A row of non-finite logits gives a NaN log-prob: check it.
    """
    if temperature == 0.0:
        tokens_B = logits_BV.argmax(dim=-1)
        chosen = logits_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        return tokens_B, chosen - chosen  # NaN stays NaN
    if temperature != 1.0:
        logits_BV = logits_BV / temperature
    probs_BV = torch.softmax(logits_BV, dim=-1)
    allowed_BV = _narrow(probs_BV, top_p, top_k) if top_k or top_p < 1.0 else probs_BV
    # float64: in a large vocabulary a float32 sum would lose tokens below 6e-8.
    cumulative_BV = allowed_BV.cumsum(dim=-1, dtype=torch.float64)
    # The first token whose sum exceeds the target: its own probability is above 0. As the target stays below the total,
    # also after rounding, there is one; only rows of NaN end beyond the vocabulary.
    target_B1 = uniforms_B.clamp(max=1.0 - 2.0**-52).unsqueeze(1) * cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logits_BV.shape[1] - 1)
    return tokens_B1.squeeze(1), probs_BV.gather(1, tokens_B1).squeeze(1).log_()


def _narrow(probs_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Zero all but the `top_k` most likely tokens, and of these all beyond the first whose sum reaches `top_p`.

    Equal probabilities rank by token id. The result is in vocabulary order again, so that two tokens which nearly tie
    cannot trade places, and so change what a uniform means, by the rounding of another batch.
    """
    ranked_BV, tokens_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if top_p < 1.0:
        before_BV = ranked_BV.cumsum(dim=-1, dtype=torch.float64) - ranked_BV
        ranked_BV = ranked_BV.masked_fill(before_BV >= top_p, 0.0)
    if top_k:
        ranked_BV[:, top_k:] = 0.0
    return torch.zeros_like(probs_BV).scatter_(1, tokens_BV, ranked_BV)
