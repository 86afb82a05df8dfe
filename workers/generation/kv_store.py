"""The KV itself: the pool, one row per token, and the windows in which running sequences attend.

`kv_cache.py` says which row is whose; here are the tensors. `Pass` binds one forward pass to them: it is what
`model.decode` calls for attention. Every version has one window per class of context lengths
(`batching.attention_groups`), in which a sequence keeps its lane while it runs.
"""

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

from workers.generation.batching import SHORT_KEYS, assign_lanes, attention_groups, token_places
from workers.generation.kv_cache import WRITTEN, KVTables
from workers.generation.kv_window import Window, WindowAttention
from workers.model_config import ModelConfig

_WIDTH_STEP = 64
_SERIAL = 1 << 32  # a place is serial number of the window * _SERIAL + lane


class _Lanes:
    """A window and who has its lanes: `places` [lanes] as they are noted per seat, `seats` [lanes] (-1: nobody yet)."""

    def __init__(self, window: Window, serial: int) -> None:
        self.window = window
        self.places = serial * _SERIAL + np.arange(window.num_lanes)
        self.seats = np.full(window.num_lanes, -1, dtype=np.int64)


class KVStore:
    """Single-threaded. Memory: the pool, and windows of about the running sequences' KV again, padded."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KVTables,
        dtype: torch.dtype,
        device: torch.device,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """beat: a sign of life, given in each layer of a pass."""
        self._beat = beat
        self._config = config
        self._cache = cache
        self._dtype, self._device = dtype, device
        shape = (cache.pool.num_rows + 1, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        self.pool = (
            _untouched_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._windows: dict[tuple[int, int], _Lanes] = {}  # by (version, key class)
        self._num_windows = 0
        self._places = np.full(cache.num_seats, -1, dtype=np.int64)  # by seat; -1: in no window

    def forget(self, seats: np.ndarray) -> None:
        """These sequences start (again): what a window holds of them may be old."""
        if len(self._places) < self._cache.num_seats:
            more = np.full(self._cache.num_seats - len(self._places), -1, dtype=np.int64)
            self._places = np.concatenate((self._places, more))
        self._places[seats] = -1

    def drop_version(self, version: int) -> None:
        for key in [key for key in self._windows if key[0] == version]:
            del self._windows[key]

    def begin(self, version: int, seats: np.ndarray, takes: np.ndarray, limits: np.ndarray) -> "Pass":
        """Lay out a pass: each seat's next `takes` tokens; `limits`, the length it may reach, sizes new windows."""
        starts = self._cache.computed[seats]
        ends = starts + takes
        parts: list[tuple[Window, int, int]] = []  # window, first lane, number of lanes
        order: list[np.ndarray] = []
        for key_class, groups in attention_groups(takes, ends):
            everyone = groups[0] if len(groups) == 1 else np.concatenate(groups)
            lanes = self._window(
                version, key_class, len(everyone), int(ends[everyone].max()), int(limits[everyone].max())
            )
            first = 0
            for members in groups:
                by_lane = self._enter(lanes, first, seats[members])
                order.append(members if by_lane is None else members[by_lane])
                parts.append((lanes.window, first, len(members)))
                first += len(members)
        members = order[0] if len(order) == 1 else np.concatenate(order)
        seats, starts, takes = seats[members], starts[members], takes[members]
        sequence, position = token_places(starts, takes)
        attentions, begin, token = [], 0, 0
        for window, first, num in parts:
            here = slice(begin, begin + num)
            tokens = slice(token, token + int(takes[here].sum()))
            attentions.append(
                WindowAttention(
                    self._config, window, first, starts[here], takes[here], sequence[tokens] - begin, position[tokens]
                )
            )
            begin, token = here.stop, tokens.stop
        return Pass(seats, takes, sequence, position, attentions, self._beat)

    def end(self, done: "Pass") -> None:
        """Copy what the pass computed to the pool, and note it."""
        cache = self._cache
        rows = cache.rows[done.seats[done.sequence], done.position]
        index, begin = self.tensor(rows), 0
        for attention in done.attentions:
            end = begin + attention.num_tokens
            attention.window.store(self.pool, attention.places, index[begin:end])
            begin = end
        cache.computed[done.seats] += done.takes
        cache.pool.writer[rows] = WRITTEN

    def tensor(self, array: np.ndarray) -> Tensor:
        """The array's memory itself on the CPU, a copy on another device."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _enter(self, lanes: _Lanes, first: int, group: np.ndarray) -> np.ndarray | None:
        """Give the seats the lanes from `first` on, filled; returns the order that sorts `group` by lane, None if it
        is.
        """
        num = len(group)
        current = self._places[group]
        if (current == lanes.places[first : first + num]).all():
            return None
        lane = current - lanes.places[first]
        lane[(lane < 0) | (lane >= lanes.window.num_lanes)] = -1
        assigned = assign_lanes(lane)
        moved = np.flatnonzero(assigned != lane)
        moved = moved[np.argsort(assigned[moved])]
        if len(moved):
            taken = assigned[moved] + first
            before = lanes.seats[taken]
            ousted = before[(before >= 0) & (self._places[before] == lanes.places[taken])]
            self._places[ousted] = -1
            self._load(lanes.window, taken, group[moved])
            lanes.seats[taken] = group[moved]
            self._places[group[moved]] = lanes.places[taken]
        return np.argsort(assigned)

    def _window(self, version: int, key_class: int, num_lanes: int, width: int, limit: int) -> _Lanes:
        """The version's window for contexts of this class, made anew when the sequences do not fit."""
        known = self._windows.get((version, key_class))
        had_lanes, had_width = (known.window.num_lanes, known.window.width) if known is not None else (0, 0)
        if known is not None and num_lanes <= had_lanes and width <= had_width:
            return known
        if num_lanes > had_lanes:
            num_lanes += num_lanes // 4
        if width > had_width:
            # Room to grow: by half, in short contexts at once to their most. Beyond its class a sequence changes
            # windows.
            ceiling = SHORT_KEYS * 4**key_class
            width = max(width, min(width + width // 2 if key_class else ceiling, limit, ceiling))
        num_lanes, width = max(num_lanes, had_lanes), max(width, had_width)
        window = Window(self._config, num_lanes, -(-width // _WIDTH_STEP) * _WIDTH_STEP, self._dtype, self._device)
        self._num_windows += 1
        made = _Lanes(window, self._num_windows)
        self._windows[version, key_class] = made
        return made

    def _load(self, window: Window, lanes: np.ndarray, seats: np.ndarray) -> None:
        """Fill lanes with what is computed of the seats."""
        computed = self._cache.computed[seats]
        width = int(computed.max())
        rows = self._cache.rows[seats, :width]
        # A row not computed yet may hold anything, even another version's NaN: what is masked must be finite.
        rows[np.arange(width) >= computed[:, None]] = 0
        window.load(self.pool, lanes, rows)


class Pass:
    """One forward pass of one version; `model.Attend`. Its tokens lie end to end, sequence by sequence.

    seats, takes int64 [B]: who takes part, with how many tokens; sequence (index into seats), position int64 [N].
    beat: called once a layer.
    """

    __slots__ = ("attentions", "beat", "position", "sequence", "seats", "takes")

    def __init__(
        self,
        seats: np.ndarray,
        takes: np.ndarray,
        sequence: np.ndarray,
        position: np.ndarray,
        attentions: list[WindowAttention],
        beat: Callable[[], None],
    ) -> None:
        self.beat = beat
        self.seats = seats
        self.takes = takes
        self.sequence = sequence
        self.position = position
        self.attentions = attentions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, h], k and v [N, K, h] -> [N, H, h]."""
        self.beat()
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
