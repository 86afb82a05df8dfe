"""Dense copies of KV for attention: the pool's rows of many sequences, laid side by side.

Attention wants keys as one array per sequence, the pool keeps tokens wherever there was room. Gathering all keys at
every step cost more than the rest of the pass (192 sequences of 64 tokens: 3.7 ms of 5 ms a layer). So the sequences
that decode together keep a lane each in a *window*; a pass writes its new keys and values there, attends, and copies
the same few tokens to the pool. Only a sequence that joins is gathered. All in a window run under one version.

Shape letters: L layers, K key/value heads, G query heads per key/value head, h head size; N tokens, B sequences
(lanes), Q queries a sequence (padded), T keys (padded).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model_config import ModelConfig

_BMM_QUERIES = 16  # up to so many query rows two batched products beat the fused kernel (by 1.3 to 1.9 at one thread)
_MASK_CELLS = 1 << 22  # longer prefill attends in blocks of queries, so that a mask takes at most 16 MB
_TABLE_WIDTH = 512  # masks of windows up to this width are looked up
_LOAD_ROWS = 1 << 16  # pool rows gathered at once when lanes are filled


class Window:
    """KV of `num_lanes` sequences of up to `width` tokens. Fresh lanes are zero: what is masked must be finite."""

    def __init__(
        self, config: ModelConfig, num_lanes: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, 2, num_lanes, config.num_kv_heads, width, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)  # [L, 2, lanes, K, width, h]
        self.num_lanes = num_lanes
        self.width = width
        per_lane = (num_lanes * config.num_kv_heads, width, config.head_dim)
        self.layers = [(keys.view(per_lane), values.view(per_lane)) for keys, values in self.kv]
        self.flat_layers = [
            (keys.view(-1, config.head_dim), values.view(-1, config.head_dim)) for keys, values in self.layers
        ]
        self.flat = self.kv.view(config.num_layers * 2, -1, config.head_dim)

    def load(self, pool: Tensor, lanes: np.ndarray, rows: np.ndarray) -> None:
        """Fill lanes (ascending) from the pool [rows, L, 2, K, h]; rows int64 [lanes, T], padded with row 0."""
        num_layers, _, _, num_kv, _, head_dim = self.kv.shape
        num, width = rows.shape
        if width == 0:
            return
        flat_pool = pool.view(len(pool), -1)
        breaks = (np.flatnonzero(np.diff(lanes) != 1) + 1).tolist()
        step = max(1, _LOAD_ROWS // width)
        # Slices copy three times faster than lanes picked by index; lanes mostly come in runs.
        for run_begin, run_end in zip([0, *breaks], [*breaks, num], strict=True):
            for begin in range(run_begin, run_end, step):
                end = min(begin + step, run_end)
                index = torch.from_numpy(rows[begin:end].ravel()).to(pool.device)
                gathered = flat_pool.index_select(0, index).view(end - begin, width, num_layers, 2, num_kv, head_dim)
                lane = int(lanes[begin])
                self.kv[:, :, lane : lane + end - begin, :, :width].copy_(gathered.permute(2, 3, 0, 4, 1, 5))

    def store(self, pool: Tensor, places: Tensor, rows: Tensor) -> None:
        """Copy tokens to the pool: places [N * K] as in `WindowAttention`, rows int64 [N]."""
        num_layers, _, _, num_kv, _, head_dim = self.kv.shape
        tokens = self.flat.index_select(1, places).view(num_layers, 2, -1, num_kv, head_dim)
        pool.index_copy_(0, rows, tokens.permute(2, 0, 1, 3, 4))


@lru_cache(maxsize=16)
def _causal_table(width: int, reach: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[width, width]: row p is the additive mask of a query at position p that sees `reach` positions, its own last."""
    seen = torch.ones((width, width), dtype=torch.bool, device=device).tril_().triu_(1 - reach)
    return torch.zeros((width, width), dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


@dataclass(slots=True)
class _View:
    """What the queries of one pass see in layers of one reach: keys from `begin` on, minus what the mask hides.

    mask: additive; None: made for each block of queries. beta 0: all those keys are seen, the mask is not looked at.
    """

    reach: int
    begin: int
    mask: Tensor | None = None
    beta: float = 1.0


class WindowAttention:
    """Causal attention of one pass for the sequences in B lanes of a window, from the lane `first` on, for all
    layers. (A lane's `Window` is where its KV lies; how far back a layer looks is called its reach here.)
    """

    def __init__(
        self,
        config: ModelConfig,
        window: Window,
        first: int,
        starts: np.ndarray,
        takes: np.ndarray,
        sequence: np.ndarray,
        position: np.ndarray,
    ) -> None:
        """starts, takes int64 [B]: each lane's context so far and its new tokens; sequence, position int64 [N]:
        theirs.
        """
        device, dtype = window.kv.device, window.kv.dtype
        num_kv, num_queries = config.num_kv_heads, int(takes.max())
        self.window = window
        self.first = first
        self.num_tokens, self.num_sequences, self.num_queries = len(sequence), len(takes), num_queries
        self.num_keys = int((starts + takes).max())
        self.num_kv, self.num_groups, self.head_dim = num_kv, config.num_heads // num_kv, config.head_dim
        self.scale = 1.0 / sqrt(config.head_dim)
        places = ((sequence + first) * (num_kv * window.width) + position)[:, None] + np.arange(num_kv) * window.width
        self.places = torch.from_numpy(places.ravel()).to(device)
        self.pad: Tensor | None = None  # [B * Q] token of each padded query; a short sequence repeats its last
        self.unpad: Tensor | None = None  # [N] padded query of each token
        self.query_position = starts[:, None]  # [B, Q]
        if num_queries > 1:
            offsets = np.minimum(np.arange(num_queries), takes[:, None] - 1)
            self.query_position = self.query_position + offsets
            if self.num_tokens < len(takes) * num_queries:
                first_token = np.cumsum(takes) - takes
                self.pad = torch.from_numpy((first_token[:, None] + offsets).ravel()).to(device)
                self.unpad = torch.from_numpy(sequence * num_queries + position - starts[sequence]).to(device)
        self.use_bmm = num_queries * self.num_groups <= _BMM_QUERIES and dtype in (torch.float32, torch.float64)
        self.queries_per_block = max(1, _MASK_CELLS // (len(takes) * self.num_groups * self.num_keys))
        first_query = int(starts.min())
        if config.layer_windows:
            # A window that no key of this pass lies beyond is none.
            reaches = [min(window, self.num_keys) or self.num_keys for window in config.layer_windows]
            views = {reach: self._view(reach, first_query) for reach in set(reaches)}
            self.views = [views[reach] for reach in reaches]
        else:
            self.views = [self._view(self.num_keys, first_query)] * config.num_layers

    def _view(self, reach: int, first_query: int) -> _View:
        view = _View(reach, begin=max(0, first_query + 1 - reach))
        device, dtype = self.window.kv.device, self.window.kv.dtype
        if not self.use_bmm:
            if self.queries_per_block >= self.num_queries:
                view.mask = self._mask(self.query_position, reach, view.begin)
        elif self.num_queries == 1 and first_query + 1 == self.num_keys:
            view.beta, view.mask = 0.0, _causal_table(1, 1, dtype, device).view(1, 1, 1)  # every key is seen
        elif self.window.width <= _TABLE_WIDTH:
            num_shared = 1 if self.num_queries == 1 else self.num_groups  # rows that baddbmm does not repeat by itself
            shape = (self.num_sequences, self.num_kv, self.num_queries, num_shared)
            by_row = np.broadcast_to(self.query_position[:, None, :, None], shape)
            reach = reach if reach < self.num_keys else self.window.width  # one table for all that see everything
            table = _causal_table(self.window.width, reach, dtype, device)
            chosen = table.index_select(0, torch.from_numpy(by_row.flatten()).to(device))
            view.mask = chosen.view(shape[0] * shape[1], -1, self.window.width)[:, :, view.begin : self.num_keys]
        else:
            wide = self._mask(self.query_position, reach, view.begin).expand(-1, self.num_kv, -1, -1)
            view.mask = wide.reshape(-1, self.num_queries * self.num_groups, self.num_keys - view.begin)
        return view

    def _mask(self, query_position: np.ndarray, reach: int, begin: int) -> Tensor:
        """query positions [B, q] -> additive [B, 1, q * G, T - begin]: -inf where the key lies after the query or out
        of its reach.
        """
        device, dtype = self.window.kv.device, self.window.kv.dtype
        queries = torch.from_numpy(query_position).to(device).repeat_interleave(self.num_groups, dim=1).unsqueeze(-1)
        keys = torch.arange(begin, self.num_keys, device=device)
        is_hidden = keys > queries
        if reach < self.num_keys:
            is_hidden |= keys <= queries - reach
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
        return mask.masked_fill_(is_hidden, float("-inf")).unsqueeze(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, K * G, h], k and v [N, K, h] of the new tokens -> [N, K * G, h]; k and v stay in the window."""
        num, queries, head_dim = self.num_sequences, self.num_queries, self.head_dim
        flat_keys, flat_values = self.window.flat_layers[layer]
        flat_keys.index_copy_(0, self.places, k.reshape(-1, head_dim))
        flat_values.index_copy_(0, self.places, v.reshape(-1, head_dim))
        if self.pad is not None:
            q = q.index_select(0, self.pad)
        if queries > 1:  # query heads that share keys become further rows of queries
            q = q.reshape(num, queries, self.num_kv, self.num_groups, head_dim).transpose(1, 2)
        q = q.reshape(num * self.num_kv, queries * self.num_groups, head_dim)
        out = self._attend_short(layer, q) if self.use_bmm else self._attend_long(layer, q)
        if queries > 1:
            out = out.view(num, self.num_kv, queries, self.num_groups, head_dim).transpose(1, 2)
        out = out.reshape(num * queries, self.num_kv * self.num_groups, head_dim)
        return out if self.unpad is None else out.index_select(0, self.unpad)

    def _attend_short(self, layer: int, q: Tensor) -> Tensor:
        all_keys, all_values = self.window.layers[layer]
        view = self.views[layer]
        lanes = slice(self.first * self.num_kv, (self.first + self.num_sequences) * self.num_kv)
        seen = slice(view.begin, self.num_keys)
        keys, values = all_keys[lanes, seen], all_values[lanes, seen]
        assert view.mask is not None, "short queries always come with a mask"
        scores = torch.baddbmm(view.mask, q, keys.transpose(1, 2), beta=view.beta, alpha=self.scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values)

    def _attend_long(self, layer: int, q: Tensor) -> Tensor:
        view = self.views[layer]
        keys, values = self.window.kv[layer, :, self.first : self.first + self.num_sequences, :, : self.num_keys]
        q = q.view(self.num_sequences, self.num_kv, -1, self.head_dim)
        if view.mask is not None:
            keys, values = keys[:, :, view.begin :], values[:, :, view.begin :]
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=view.mask, scale=self.scale)
        blocks = []
        step = self.queries_per_block
        for first in range(0, self.num_queries, step):
            positions = self.query_position[:, first : first + step]
            begin = max(0, int(positions.min()) + 1 - view.reach)
            mask = self._mask(positions, view.reach, begin)
            part = q[:, :, first * self.num_groups : (first + step) * self.num_groups]
            blocks.append(
                F.scaled_dot_product_attention(
                    part, keys[:, :, begin:], values[:, :, begin:], attn_mask=mask, scale=self.scale
                )
            )
        return torch.cat(blocks, dim=2)
