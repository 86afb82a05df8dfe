"""Causal attention over whole sequences that lie packed end to end, for the learner.

Everything but attention runs on packed tokens [N, ...]; only here are they spread to [B, T, ...] with padding on the
right, where the causal mask already keeps real tokens from seeing it. Moving there and back are autograd functions of
their own: the gradient of a gather is then a gather too, where autograd's would be an `index_add` (slow on the CPU, and
in no fixed order on CUDA).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Pad(torch.autograd.Function):
    """packed [N, X, h] -> padded [B * T, X, h]; the padding repeats token 0 and hands no gradient back."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, pad_index: Tensor, pack_index: Tensor) -> Tensor:
        ctx.save_for_backward(pack_index)
        return packed.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (pack_index,) = ctx.saved_tensors
        return gradient.index_select(0, pack_index), None, None


class _Pack(torch.autograd.Function):
    """padded [B * T, X, h] -> packed [N, X, h]; the padding's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, pack_index: Tensor) -> Tensor:
        ctx.save_for_backward(pack_index)
        ctx.num_padded = padded.shape[0]
        return padded.index_select(0, pack_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (pack_index,) = ctx.saved_tensors
        padded = gradient.new_zeros((ctx.num_padded, *gradient.shape[1:]))
        return padded.index_copy_(0, pack_index, gradient), None


class PackedAttention:
    """The `attend` of one micro-batch; its arguments are int64 and `MicroBatch`'s of the same names."""

    def __init__(self, shape: tuple[int, int], pad_index: Tensor, pack_index: Tensor):
        self.shape = shape
        self.pad_index = pad_index
        self.pack_index = pack_index
        self.is_padded = pad_index.shape[0] != pack_index.shape[0]  # rows of one length already lie as [B, T]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, h], k and v [N, K, h] -> [N, H, h]."""
        is_grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(
            self._spread(q), self._spread(k), self._spread(v), is_causal=True, enable_gqa=is_grouped
        )
        attended = attended.transpose(1, 2).flatten(0, 1)
        return _Pack.apply(attended, self.pack_index) if self.is_padded else attended

    def _spread(self, x: Tensor) -> Tensor:
        padded = _Pad.apply(x, self.pad_index, self.pack_index) if self.is_padded else x
        return padded.view(*self.shape, *x.shape[1:]).transpose(1, 2)
