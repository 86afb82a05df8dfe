"""The decoder that sampler and learner share, so that the log-probs of both agree.

Functional: weights are views of one flat buffer, so a sampler computes on a weight slot in place and an optimizer steps
everything in a few operators. Attention itself is the caller's: the sampler reads a KV cache, the learner packs whole
sequences.

Shape letters: N tokens of any sequences, D hidden size, H query heads, K key/value heads, h head size, F intermediate
size, V vocabulary, M tokens whose logits are wanted, P positions of the RoPE table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model_config import ModelConfig, layout
from workers.rope_scaling import frequencies

# attend(layer, q [N, H, h], k [N, K, h], v [N, K, h]) -> [N, H, h]: causal attention within the layer's window, scale
# 1/sqrt(h), after RoPE.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class LayerWeights:
    """One block's tensors; a bias or QK norm that the model lacks is None."""

    attention_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2K) * h, D]
    out: Tensor  # [D, H * h]
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]
    down: Tensor  # [D, F]
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [h]
    k_norm: Tensor | None = None  # [h]
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True)
class Weights:
    """A model's tensors; `head` is `embed` itself when they are tied. `named` holds each tensor once.

    `num_ids`: how many rows of the head belong to ids that exist, None for all; `unused_ids` int64: the holes in them.
    """

    embed: Tensor  # [V, D]
    layers: list[LayerWeights]
    final_norm: Tensor  # [D]
    head: Tensor  # [V, D]
    named: dict[str, Tensor]
    num_ids: int | None = None
    unused_ids: Tensor | None = None


def bind_weights(flat: Tensor, config: ModelConfig) -> Weights:
    """Views of `flat` [num_elements], any dtype and device: nothing is copied, and writes to `flat` show at once."""
    table = layout(config)
    if flat.dim() != 1 or flat.numel() != table.num_elements or not flat.is_contiguous():
        raise ValueError(
            f"The weight buffer has shape {tuple(flat.shape)}; this model needs one contiguous row of "
            f"{table.num_elements} elements. Make it for the same model configuration."
        )
    named = {entry.name: flat.narrow(0, entry.offset, entry.num_elements).view(entry.shape) for entry in table.entries}
    layers = []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
        layers.append(LayerWeights(**own))
    return Weights(
        embed=named["embed"],
        layers=layers,
        final_norm=named["final_norm"],
        head=named.get("head", named["embed"]),
        named=named,
        num_ids=config.num_ids if config.num_ids < config.vocab_size else None,
        unused_ids=torch.tensor(config.unused_ids, device=flat.device) if config.unused_ids else None,
    )


EMBEDDING_STD = 0.1
RESIDUAL_STD = 0.2


def init_flat(config: ModelConfig, seed: int) -> Tensor:
    """Random weights, float32 [num_elements] on the CPU; the same for a seed whatever else has drawn random numbers.

    Matrices are normal with deviation 1/sqrt(inputs) (LeCun), which keeps variances through a layer whatever its width;
    EMBEDDING_STD and RESIDUAL_STD (what writes to the residual stream) are what a search over `guess` found to learn
    best. Norms start at 1, biases at 0. A tiny model learns from its first rewards only if its layers say something
    at the start: with the 0.02 of large models it learned far more slowly (docs/decisions/tasks.md).
    """
    flat = torch.zeros(layout(config).num_elements, dtype=torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for name, tensor in bind_weights(flat, config).named.items():
        if tensor.dim() == 2:
            tensor.normal_(0.0, _initial_std(name, inputs=tensor.shape[1]), generator=generator)
        elif name.endswith("norm"):
            tensor.fill_(1.0)
    return flat


def _initial_std(name: str, inputs: int) -> float:
    if name == "embed":
        return EMBEDDING_STD
    return RESIDUAL_STD if name.endswith((".out", ".down")) else 1.0 / sqrt(inputs)


class RopeTable:
    """Cosines and signed sines of all positions, in the half-rotation form that Hugging Face's checkpoints need.

    Feature i turns with feature i + h/2 by the angle position * frequency(i), `rope_scaling.frequencies`. The sines of
    the first half are stored negated: rotated = x * cos + swap_halves(x) * sin. Memory: `max_positions` rows, so a run
    cuts those of its config to the longest context it allows; no frequency depends on them.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        # In float64: a float32 angle at position 100,000 is off by 0.004.
        turns = torch.tensor(frequencies(config.rope, config.rope_theta, config.head_dim), dtype=torch.float64)
        angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float64), turns)
        scale = config.rope.attention_factor
        cos, sin = ((scale * values()).to(device, dtype).unsqueeze(1) for values in (angles.cos, angles.sin))
        self.cos_P1h = torch.cat((cos, cos), dim=-1)
        self.sin_P1h = torch.cat((-sin, sin), dim=-1)

    def at(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, h]; positions int64 in [0, max_positions)."""
        return self.cos_P1h.index_select(0, positions_N), self.sin_P1h.index_select(0, positions_N)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: x [N, heads, h] with the rows that `RopeTable.at` gave."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


def decode(
    weights: Weights, config: ModelConfig, rope: RopeTable, tokens_N: Tensor, positions_N: Tensor, attend: Attend
) -> Tensor:
    """tokens, positions [N] int64 -> hidden [N, D] after the final norm, in the weights' dtype.

    `attend` is called once per layer, in order, with keys and values already as they belong into a KV cache. Layers of
    `nope_layers` attend without rotation: where a token stands shows there only in what it can see.
    """
    width, eps = (config.hidden_size,), config.rms_norm_eps
    num_q, num_kv, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    cos, sin = rope.at(positions_N)
    hidden = F.embedding(tokens_N, weights.embed)
    for layer, own in enumerate(weights.layers):
        normed = F.rms_norm(hidden, width, own.attention_norm, eps)
        qkv = F.linear(normed, own.qkv, own.qkv_bias).view(-1, num_q + 2 * num_kv, head_dim)
        qk, v = qkv.split((num_q + num_kv, num_kv), dim=1)
        is_rotated = layer not in config.nope_layers
        if own.q_norm is not None:
            q, k = qk.split((num_q, num_kv), dim=1)
            q = F.rms_norm(q, (head_dim,), own.q_norm, eps)
            k = F.rms_norm(k, (head_dim,), own.k_norm, eps)
            if is_rotated:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        else:
            q, k = (rotate(qk, cos, sin) if is_rotated else qk).split((num_q, num_kv), dim=1)
        attended = attend(layer, q, k, v).reshape(-1, num_q * head_dim)
        hidden = hidden + F.linear(attended, own.out, own.out_bias)
        normed = F.rms_norm(hidden, width, own.mlp_norm, eps)
        gate, up = F.linear(normed, own.gate_up, own.gate_up_bias).chunk(2, dim=-1)
        hidden = hidden + F.linear(F.silu(gate) * up, own.down, own.down_bias)
    return F.rms_norm(hidden, width, weights.final_norm, eps)


def logits(weights: Weights, hidden_MD: Tensor) -> Tensor:
    """hidden [M, D] of `decode` -> logits float32 (float64 when the weights are) [M, number of ids that exist].

    An id below that number that has no token gets -inf: probability 0, and no gradient to its row of the head.
    """
    head = weights.head if weights.num_ids is None else weights.head[: weights.num_ids]
    scores = F.linear(hidden_MD, head)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores if weights.unused_ids is None else scores.index_fill_(1, weights.unused_ids, float("-inf"))
