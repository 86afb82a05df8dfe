"""Causal attention over whole sequences that lie packed end to end, for the learner.

Everything but attention runs on packed tokens [N, ...]; only here are they spread to [B, T, ...] with padding on the
right, where the causal mask already keeps real tokens from seeing it. Moving there and back are autograd functions of
their own: the gradient of a gather is then a gather too, where autograd's would be an `index_add` (slow on the CPU, and
in no fixed order on CUDA).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.learning.packing import MicroBatch


class Packing(NamedTuple):
    """How packed tokens lie in [B, T], on a device: int64, as in `MicroBatch`.

    common_tokens [C], common_places [C, R]: packed tokens that several rows begin with, and where each of them has it;
    is_place [C, R]: false where a token has fewer rows than R.
    """

    shape: tuple[int, int]
    pad_index: Tensor
    pack_index: Tensor
    common_tokens: Tensor | None = None
    common_places: Tensor | None = None
    is_place: Tensor | None = None


def packing_of(micro_batch: MicroBatch, device: torch.device) -> Packing:
    """The packing of a micro-batch, moved to `device`."""

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    common: tuple[Tensor, ...] = ()
    if len(micro_batch.common_tokens):
        places = micro_batch.common_places
        common = move(micro_batch.common_tokens), move(np.maximum(places, 0)), move(places >= 0)
    return Packing(micro_batch.shape, move(micro_batch.pad_index), move(micro_batch.pack_index), *common)


class _Pad(torch.autograd.Function):
    """packed [N, X, h] -> padded [B * T, X, h]; the padding repeats token 0 and hands no gradient back.

    What several rows have in common gets the sum of their gradients, row by row in one order.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return packed.index_select(0, packing.pad_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        packing = ctx.packing
        packed = gradient.index_select(0, packing.pack_index)
        if packing.common_tokens is not None:
            places = packing.common_places
            of_rows = gradient.index_select(0, places.flatten()).unflatten(0, places.shape)
            packed.index_copy_(0, packing.common_tokens, (of_rows * packing.is_place[..., None, None]).sum(dim=1))
        return packed, None


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


_BLOCK_QUERIES = 512  # a layer with a window attends in blocks of so many: neither mask nor work grows with T * T


class PackedAttention:
    """The `attend` of one micro-batch.

    windows: per layer how many positions a query sees, its own included, 0 for all; () for no window in any layer.
    beat: called once a layer, and once more when its gradient comes back: on CUDA from autograd's thread, while the
    one that asked for the gradient waits.
    """

    def __init__(
        self, packing: Packing, windows: tuple[int, ...] = (), beat: Callable[[], None] = lambda: None
    ) -> None:
        self.windows = windows
        self.beat = beat
        self.packing = packing
        self.shape = packing.shape
        # Rows of one length that have nothing in common already lie as [B, T].
        self.is_padded = packing.pad_index.shape[0] != packing.pack_index.shape[0]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, h], k and v [N, K, h] -> [N, H, h]."""
        self.beat()
        if q.requires_grad:
            q.register_hook(self._beat_backward)
        is_grouped = q.shape[1] != k.shape[1]
        q, k, v = self._spread(q), self._spread(k), self._spread(v)
        window = self.windows[layer] if self.windows else 0
        if 0 < window < self.shape[1]:
            attended = _attend_within(q, k, v, window)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        attended = attended.transpose(1, 2).flatten(0, 1)
        return _Pack.apply(attended, self.packing.pack_index) if self.is_padded else attended

    def _beat_backward(self, gradient: Tensor) -> None:
        self.beat()

    def _spread(self, x: Tensor) -> Tensor:
        padded = _Pad.apply(x, self.packing) if self.is_padded else x
        return padded.view(*self.shape, *x.shape[1:]).transpose(1, 2)


def _attend_within(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q [B, H, T, h], k and v [B, K, T, h] -> [B, H, T, h]: each query sees `window` positions, its own the last."""
    length = q.shape[2]
    if q.shape[1] != k.shape[1]:
        # No fused CUDA kernel takes both a mask and keys that heads share; on the CPU it costs nothing. An expansion's
        # gradient is a sum in a fixed order.
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2) for x in (k, v))
    blocks = []
    for first in range(0, length, _BLOCK_QUERIES):
        end = min(first + _BLOCK_QUERIES, length)
        begin = max(0, first + 1 - window)
        seen = torch.ones((end - first, end - begin), dtype=torch.bool, device=q.device)
        seen = seen.tril_(first - begin).triu_(first - begin + 1 - window)
        part, keys, values = q[:, :, first:end], k[:, :, begin:end], v[:, :, begin:end]
        blocks.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=seen))
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]
