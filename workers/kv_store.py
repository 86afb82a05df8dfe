"""The KV itself: the pool, one row per token, and the windows in which running sequences attend.

`workers/kv_cache.py` says which row is whose; here are the tensors. `Pass` binds one forward pass to them: it is what
`model.decode` calls for attention. Every version has one lasting window per class of context lengths
(`batching.attention_groups`), in which a sequence keeps its lane while it runs.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

from workers.batching import SHORT_KEYS, assign_lanes, attention_groups, token_places
from workers.kv_cache import WRITTEN, KVCache
from workers.kv_window import Window, WindowAttention
from workers.model_config import ModelConfig

_LANES, _WIDTH = 16, 64  # lasting windows grow in these steps
_SERIAL = 1 << 32  # a place is serial number of the window * _SERIAL + lane


class _LastingWindow:
    """A window and who has its lanes: `places` [lanes] as they are noted per slot, `slots` [lanes] (-1: nobody yet)."""

    def __init__(self, window: Window, serial: int) -> None:
        self.window = window
        self.places = serial * _SERIAL + np.arange(window.num_lanes)
        self.slots = np.full(window.num_lanes, -1, dtype=np.int64)


class KVStore:
    """Single-threaded. Memory: the pool, and windows of about the running sequences' KV again, padded."""

    def __init__(self, config: ModelConfig, cache: KVCache, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._cache = cache
        self._dtype, self._device = dtype, device
        shape = (cache.pool.num_rows + 1, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        self.pool = (
            _untouched_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._windows: dict[tuple[int, int], _LastingWindow] = {}  # by (version, key class)
        self._num_windows = 0
        self._places = np.full(cache.num_slots, -1, dtype=np.int64)  # by slot; -1: in no window

    def forget(self, slots: np.ndarray) -> None:
        """These sequences start (again): what a window holds of them may be old."""
        if len(self._places) < self._cache.num_slots:
            more = np.full(self._cache.num_slots - len(self._places), -1, dtype=np.int64)
            self._places = np.concatenate((self._places, more))
        self._places[slots] = -1

    def drop_version(self, version: int) -> None:
        for key in [key for key in self._windows if key[0] == version]:
            del self._windows[key]

    def begin(self, version: int, slots: np.ndarray, takes: np.ndarray, limits: np.ndarray) -> "Pass":
        """Lay out a pass: each slot's next `takes` tokens; `limits`, the length it may reach, sizes new windows."""
        starts = self._cache.computed[slots]
        ends = starts + takes
        parts: list[tuple[Window, int]] = []
        order: list[np.ndarray] = []
        for sizes, members in attention_groups(takes, ends):
            group = slots[members]
            if sizes[0]:  # a long prefill passes once: its window is not kept
                window = Window(self._config, len(group), int(ends[members].max()), self._dtype, self._device)
                self._places[group] = -1
                self._load(window, np.arange(len(group)), group)
            else:
                lasting = self._lasting_window(version, sizes[1], ends[members], limits[members])
                window = lasting.window
                by_lane = self._enter(lasting, group)
                members = members if by_lane is None else members[by_lane]
            parts.append((window, len(members)))
            order.append(members)
        members = order[0] if len(order) == 1 else np.concatenate(order)
        slots, starts, takes = slots[members], starts[members], takes[members]
        sequence, position = token_places(starts, takes)
        attentions, lane, token = [], 0, 0
        for window, num in parts:
            here = slice(lane, lane + num)
            tokens = slice(token, token + int(takes[here].sum()))
            attentions.append(
                WindowAttention(
                    self._config, window, starts[here], takes[here], sequence[tokens] - lane, position[tokens]
                )
            )
            lane, token = here.stop, tokens.stop
        return Pass(self, slots, takes, sequence, position, attentions)

    def end(self, done: "Pass") -> None:
        """Copy what the pass computed to the pool, and note it."""
        cache = self._cache
        rows = cache.rows[done.slots[done.sequence], done.position]
        index, begin = self.tensor(rows), 0
        for attention in done.attentions:
            end = begin + attention.num_tokens
            attention.window.store(self.pool, attention.places, index[begin:end])
            begin = end
        cache.computed[done.slots] += done.takes
        cache.pool.writer[rows] = WRITTEN

    def tensor(self, array: np.ndarray) -> Tensor:
        """The array's memory itself on the CPU, a copy on another device."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _enter(self, lasting: _LastingWindow, group: np.ndarray) -> np.ndarray | None:
        """See that the slots have the lanes 0 … B-1, filled; returns the order that sorts `group` by lane, if it
        isn't.
        """
        num = len(group)
        current = self._places[group]
        if (current == lasting.places[:num]).all():
            return None
        lanes = current - lasting.places[0]
        lanes[(lanes < 0) | (lanes >= lasting.window.num_lanes)] = -1
        assigned = assign_lanes(lanes)
        moved = np.flatnonzero(assigned != lanes)
        moved = moved[np.argsort(assigned[moved])]
        if len(moved):
            taken = assigned[moved]
            before = lasting.slots[taken]
            ousted = before[(before >= 0) & (self._places[before] == lasting.places[taken])]
            self._places[ousted] = -1
            self._load(lasting.window, taken, group[moved])
            lasting.slots[taken] = group[moved]
            self._places[group] = lasting.places[assigned]
        return np.argsort(assigned)

    def _lasting_window(self, version: int, key_class: int, ends: np.ndarray, limits: np.ndarray) -> _LastingWindow:
        """The version's window for contexts of this size, made anew when the group does not fit."""
        known = self._windows.get((version, key_class))
        lanes, width = len(ends), int(ends.max())
        if known is not None and known.window.num_lanes >= lanes and known.window.width >= width:
            return known
        # Room to grow, as far as this class reaches: beyond, a sequence goes to the next class's window.
        width = max(width, min(int(limits.max()), SHORT_KEYS * 4**key_class))
        if known is not None:
            lanes, width = max(lanes, known.window.num_lanes), max(width, known.window.width)
        window = Window(
            self._config, -(-lanes // _LANES) * _LANES, -(-width // _WIDTH) * _WIDTH, self._dtype, self._device
        )
        self._num_windows += 1
        made = _LastingWindow(window, self._num_windows)
        self._windows[version, key_class] = made
        return made

    def _load(self, window: Window, lanes: np.ndarray, slots: np.ndarray) -> None:
        """Fill lanes with what is computed of the slots."""
        computed = self._cache.computed[slots]
        width = int(computed.max())
        rows = self._cache.rows[slots, :width]
        # A row not computed yet may hold anything, even another version's NaN: what is masked must be finite.
        rows[np.arange(width) >= computed[:, None]] = 0
        window.load(self.pool, lanes, rows)


class Pass:
    """One forward pass of one version; `model.Attend`. Its tokens lie end to end, sequence by sequence.

    slots, takes int64 [B]: who takes part, with how many tokens; sequence (index into slots), position int64 [N].
    """

    __slots__ = ("attentions", "position", "sequence", "slots", "store", "takes")

    def __init__(
        self,
        store: KVStore,
        slots: np.ndarray,
        takes: np.ndarray,
        sequence: np.ndarray,
        position: np.ndarray,
        attentions: list[WindowAttention],
    ) -> None:
        self.store = store
        self.slots = slots
        self.takes = takes
        self.sequence = sequence
        self.position = position
        self.attentions = attentions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, h], k and v [N, K, h] -> [N, H, h]."""
        if len(self.attentions) == 1:
            return self.attentions[0](layer, q, k, v)
        outs, begin = [], 0
        for attention in self.attentions:
            end = begin + attention.num_tokens
            outs.append(attention(layer, q[begin:end], k[begin:end], v[begin:end]))
            begin = end
        return torch.cat(outs)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in pages that take no memory until they are written: `torch.zeros` would fill a large pool at once."""
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
