"""Generation of segments: continuous batching over (policy version, sequence), one forward pass a version and step.

A request brings a trajectory's whole context; the engine keeps the KV of earlier requests and of the group's common
prompt, so that mostly only new tokens are computed (`workers/kv_cache.py`). `step` starts waiting requests as memory
allows, oldest first, and takes one pass for each version that has work: decode and prefill together, prefill in
chunks of `max_batch_tokens`. Short of memory it evicts the KV of trajectories between requests, then takes back the
youngest running request, which is computed again later: its tokens stay, and noise that is a function of the position
makes the outcome the same. No request is lost.
"""

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from shm.errors import HeadwayError
from workers.batching import assign_lanes, attention_groups, share_budget, token_places
from workers.errors import NonFiniteError
from workers.kv_cache import WRITTEN, KVCache
from workers.kv_window import Window, WindowAttention
from workers.model import RopeTable, Weights, decode, logits
from workers.model_config import ModelConfig
from workers.sampling import sample, stream_keys, stream_uniforms

_HEADROOM_TOKENS = 16  # rows that a running request may still want before another one is started
_LANES, _WIDTH = 16, 64  # windows grow in these steps


class EngineError(HeadwayError, ValueError):
    """A request can never run, or the engine was called out of order."""


@dataclass(slots=True)
class EngineRequest:
    """Ask for one segment; fields as in `messages.GenerateRequest`."""

    request: int
    group: int
    member: int
    version: int
    tokens: np.ndarray  # int32, the whole context
    max_tokens: int
    generated: int


@dataclass(slots=True)
class FinishedSegment:
    """One request's outcome; fields as in `messages.Segment`."""

    request: int
    version: int
    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32, at the sampling temperature, of the full distribution
    cached: int
    stopped: bool
    seconds: float
    queue_seconds: float


class _SlotState:
    """What the engine knows of each slot of the KV cache, as arrays over slots; valid while a request is live."""

    def __init__(self, num_slots: int) -> None:
        self.context = np.zeros(num_slots, dtype=np.int64)  # length of the request's context
        self.limit = np.zeros(num_slots, dtype=np.int64)  # length at which max_tokens are reached
        self.generated = np.zeros(num_slots, dtype=np.int64)  # generated position minus sequence position
        self.key = np.zeros(num_slots, dtype=np.uint64)  # noise stream
        self.arrival = np.zeros(num_slots, dtype=np.int64)  # count of requests, never reset: the order of all queues
        self.arrived = np.zeros(num_slots)  # seconds
        self.began = np.zeros(num_slots)  # seconds; 0 before the first pass
        self.cached = np.zeros(num_slots, dtype=np.int64)  # -1 before the first start
        self.lane = np.full(num_slots, -1, dtype=np.int64)
        self.window = np.full(num_slots, -1, dtype=np.int64)  # serial number of the window that the lane is in

    def grow(self, num_slots: int) -> None:
        """Add slots; the entries of those there stay."""
        for name, table in vars(self).items():
            setattr(self, name, np.concatenate((table, np.zeros(num_slots - len(table), dtype=table.dtype))))


class Engine:
    """Single-threaded; every call returns without waiting for anything but arithmetic."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int,
        kv_tokens: int,
        max_batch_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_ids: tuple[int, ...] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`kv_tokens`: capacity of the KV pool. The windows of running sequences need about as much again, when all
        run.
        """
        if kv_tokens < 1 or max_batch_tokens < 1:
            raise EngineError(f"kv_tokens is {kv_tokens} and max_batch_tokens {max_batch_tokens}; both must be >= 1.")
        self._config = config
        self._seed = seed
        self._sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._kv_tokens = kv_tokens
        self._max_batch_tokens = max_batch_tokens
        self._device, self._dtype = torch.device(device), dtype
        self._is_stop = np.zeros(config.vocab_size, dtype=bool)
        self._is_stop[[token for token in stop_ids if 0 <= token < config.vocab_size]] = True
        self._rope = RopeTable(config, self._device, dtype)
        # Zeros, not a wrong-looking value: untouched pages then take no memory. The tests poison it.
        self._pool = torch.zeros(
            (kv_tokens + 1, config.num_layers, 2, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            device=self._device,
        )
        self._cache = KVCache(kv_tokens)
        self._state = _SlotState(self._cache.num_slots)
        self._weights: dict[int, Weights] = {}
        self._live: dict[int, EngineRequest] = {}  # by slot
        self._waiting: deque[int] = deque()  # slots, oldest request first
        self._running: dict[int, np.ndarray] = {}  # version -> slots
        self._windows: dict[tuple[int, int], tuple[int, Window]] = {}  # (version, key class) -> serial number, window
        self._num_windows = 0
        self._num_arrivals = 0
        self.num_taken_back = 0  # times a running request had to give its KV back

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool."""
        return self._pool.numel() * self._pool.element_size()

    @property
    def kv_tokens_free(self) -> int:
        """Rows of the pool that nothing holds."""
        return self._cache.pool.num_free

    def set_weights(self, version: int, weights: Weights) -> None:
        """Make `version` known. The tensors are used in place: they must not change until `drop_version`."""
        if version in self._weights:
            raise EngineError(f"Version {version} has weights already; call drop_version before new ones are set.")
        self._weights[version] = weights

    def drop_version(self, version: int) -> None:
        """Forget a version and all its KV; EngineError while a request runs or waits under it."""
        if version not in self._weights:
            raise EngineError(f"Version {version} can't be dropped; the engine holds {sorted(self._weights)}.")
        live = [request.request for request in self._live.values() if request.version == version]
        if live:
            raise EngineError(
                f"Version {version} can't be dropped: {len(live)} requests still need it (one is {live[0]}). "
                "Wait for their segments or release their trajectories first."
            )
        del self._weights[version]
        self._running.pop(version, None)
        for key in [key for key in self._windows if key[0] == version]:
            del self._windows[key]
        self._cache.drop_version(version)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; a refused one (EngineError) changes nothing."""
        num_context, cache = len(request.tokens), self._cache
        self._check(request, num_context)
        slot = cache.open(
            request.version, request.group, request.member, request.tokens, num_context + request.max_tokens
        )
        state = self._state
        if cache.num_slots > len(state.limit):
            state.grow(cache.num_slots)
        state.context[slot] = num_context
        state.limit[slot] = num_context + request.max_tokens
        state.generated[slot] = request.generated - num_context
        state.arrival[slot] = self._num_arrivals
        state.arrived[slot] = perf_counter()
        state.began[slot] = 0.0
        state.cached[slot] = -1
        self._num_arrivals += 1
        self._live[slot] = request
        self._waiting.append(slot)

    def release(self, group: int, member: int) -> int | None:
        """The trajectory has ended: free its KV. A request still live is cancelled, and its id returned: no segment
        comes.
        """
        slot = self._cache.release(group, member)
        if slot is None:
            return None
        request = self._live.pop(slot, None)
        if request is None:
            return None
        if slot in self._waiting:
            self._waiting.remove(slot)
        else:
            running = self._running[request.version]
            self._running[request.version] = running[running != slot]
        return request.request

    @torch.inference_mode()
    def step(self) -> list[FinishedSegment]:
        """Start what fits and take one pass for each version with work; the segments that ended."""
        self._start_waiting()
        self._give_rows()
        finished: list[FinishedSegment] = []
        for version, slots in self._running.items():
            if len(slots):
                done = self._pass(version, slots)
                if len(done):
                    now = perf_counter()
                    finished += [self._finish(slot, now) for slot in done.tolist()]
        return finished

    def _check(self, request: EngineRequest, num_context: int) -> None:
        name = f"Request {request.request} (trajectory {request.group}.{request.member})"
        if request.version not in self._weights:
            raise EngineError(f"{name} asks for version {request.version}; the engine holds {sorted(self._weights)}.")
        if num_context == 0 or request.max_tokens < 1:
            raise EngineError(
                f"{name} has {num_context} context tokens and max_tokens {request.max_tokens}; both must be >= 1."
            )
        need = num_context + request.max_tokens - 1  # the last token is never fed back
        available = min(self._kv_tokens, self._config.max_positions)
        if need > available:
            what = "KV cache" if self._kv_tokens <= self._config.max_positions else "model's position table"
            raise EngineError(
                f"{name} needs {need} tokens ({num_context} of context and {request.max_tokens} new ones), and the "
                f"{what} has room for {available}. Shorten its budget, or make that larger."
            )
        # Seen as unsigned, a negative id is too large as well.
        if request.tokens.dtype != np.int32 or int(request.tokens.view(np.uint32).max()) >= self._config.vocab_size:
            raise EngineError(
                f"{name} has {request.tokens.dtype} token ids from {request.tokens.min()} to {request.tokens.max()}; "
                f"they must be int32 and in [0, {self._config.vocab_size})."
            )
        slot = self._cache.slot_of(request.group, request.member)
        if slot is not None and slot in self._live:
            raise EngineError(
                f"{name} comes while request {self._live[slot].request} of the same trajectory is unfinished; a "
                "trajectory has one request at a time."
            )

    def _start_waiting(self) -> None:
        """Oldest first; what does not fit holds back those behind it, so that none waits for ever."""
        if not self._waiting:
            return
        cache, state = self._cache, self._state
        headroom = 0
        for slots in self._running.values():
            headroom += int(np.minimum(state.limit[slots] - cache.length[slots], _HEADROOM_TOKENS).sum())
        started: list[int] = []
        while self._waiting and cache.start(self._waiting[0], headroom):
            slot = self._waiting.popleft()
            started.append(slot)
            headroom += min(int(state.limit[slot] - cache.length[slot]), _HEADROOM_TOKENS)
        if not started:
            return
        slots = np.array(started)
        state.window[slots] = -1
        first = slots[state.cached[slots] < 0]
        state.cached[first] = cache.computed[first]
        if cache.borrowed:  # what another member computes counts as cached: it is not this request's work
            for slot in first.tolist():
                state.cached[slot] = cache.borrowed.get(slot, state.cached[slot])
        keys = [cache.key(slot) for slot in started]
        _, groups, members = np.array(keys, dtype=np.int64).T
        state.key[slots] = stream_keys(self._seed, groups, members)
        versions = np.array([key[0] for key in keys])
        for version in dict.fromkeys(versions.tolist()):
            new = slots[versions == version]
            running = self._running.get(version)
            self._running[version] = new if running is None else np.concatenate((running, new))

    def _give_rows(self) -> None:
        """A pool row for each token sampled in the last step; without room, take back the youngest requests."""
        cache = self._cache
        running = [slots for slots in self._running.values() if len(slots)]
        if not running:
            return
        slots = running[0] if len(running) == 1 else np.concatenate(running)
        need = slots[cache.allocated[slots] < cache.length[slots]]
        if len(need) > cache.pool.num_free and not cache.make_room(len(need)):
            need = self._take_back(slots, need)
        if len(need):
            cache.extend(need)

    def _take_back(self, slots: np.ndarray, need: np.ndarray) -> np.ndarray:
        """Stop running requests, youngest first, until each left gets its row; returns those still in need.

        The oldest is never taken: alone it fits, as `add` has checked, so every step brings it forward.
        """
        youngest_first = slots[np.argsort(-self._state.arrival[slots])]
        for slot in youngest_first[:-1].tolist():
            if self._cache.make_room(len(need)):
                break
            version = self._live[slot].version
            self._cache.pause(slot)
            self.num_taken_back += 1
            self._waiting.appendleft(slot)
            self._running[version] = self._running[version][self._running[version] != slot]
            need = need[need != slot]
        assert self._cache.make_room(len(need)), "one running request alone does not fit into the KV pool"
        return need

    def _plan(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """slots -> those that take part in the pass, and how many tokens each takes."""
        cache = self._cache
        pending = cache.length[slots] - cache.computed[slots]
        if cache.borrowed:
            for index, slot in enumerate(slots.tolist()):
                if slot in cache.borrowed:
                    end = cache.frontier(slot)  # advances `computed`
                    pending[index] = end - cache.computed[slot]
        takes = share_budget(pending, self._max_batch_tokens)
        if takes.all():
            return slots, takes
        return slots[takes > 0], takes[takes > 0]

    def _pass(self, version: int, running: np.ndarray) -> np.ndarray:
        """One forward pass; writes KV, tokens and log-probs; returns the slots whose request has ended."""
        cache, state = self._cache, self._state
        slots, takes = self._plan(running)
        assert len(slots), "a version has running requests, but none of them can compute anything"
        starts = cache.computed[slots]
        attentions: list[WindowAttention] = []
        order: list[np.ndarray] = []
        for sizes, members in attention_groups(takes, starts + takes):
            window, members = self._place(version, sizes, slots, members, starts, takes)
            attentions.append(WindowAttention(self._config, window, starts[members], takes[members]))
            order.append(members)
        members = order[0] if len(order) == 1 else np.concatenate(order)
        slots, starts, takes = slots[members], starts[members], takes[members]
        if len(slots) == len(running):
            self._running[version] = slots  # the order of the lanes, so that the next pass need not sort again
        now = perf_counter()
        fresh = slots[state.began[slots] == 0.0]
        state.began[fresh] = now

        sequence, position = token_places(starts, takes)
        of_token = slots[sequence]
        rows = cache.rows[of_token, position]
        hidden = decode(
            self._weights[version],
            self._config,
            self._rope,
            self._tensor(cache.tokens[of_token, position].astype(np.int64)),
            self._tensor(position),
            _Attend(attentions),
        )
        self._store(attentions, self._tensor(rows))
        cache.computed[slots] = starts + takes
        cache.pool.writer[rows] = WRITTEN

        is_sampled = cache.computed[slots] == cache.length[slots]
        slots = slots[is_sampled]
        if not len(slots):
            return slots
        if len(slots) < len(sequence):
            hidden = hidden.index_select(0, self._tensor((np.cumsum(takes) - 1)[is_sampled]))
        return self._sample(version, slots, logits(self._weights[version], hidden))

    def _place(
        self,
        version: int,
        sizes: tuple[int, int],
        slots: np.ndarray,
        members: np.ndarray,
        starts: np.ndarray,
        takes: np.ndarray,
    ) -> tuple[Window, np.ndarray]:
        """A window with the KV of a group of sequences; returns it and `members` in the order of its lanes 0, 1, …"""
        state = self._state
        group, num = slots[members], len(members)
        query_class, key_class = sizes
        if query_class:  # a long prefill passes once: its window is not kept
            window = Window(self._config, num, int((starts[members] + takes[members]).max()), self._dtype, self._device)
            state.window[group] = -1
            self._load(window, np.arange(num), group)
            return window, members
        serial, window = self._lasting_window(version, key_class, group, num)
        current = np.where(state.window[group] == serial, state.lane[group], -1)
        lanes = assign_lanes(current)
        moved = lanes != current
        if moved.any():
            new_lanes = lanes[moved]
            evicted, at = window.slot_of_lane[new_lanes], new_lanes
            evicted, at = evicted[evicted >= 0], at[evicted >= 0]
            still = (state.window[evicted] == serial) & (state.lane[evicted] == at)
            state.window[evicted[still]] = -1
            by_lane = np.argsort(new_lanes)
            self._load(window, new_lanes[by_lane], group[moved][by_lane])
            window.slot_of_lane[new_lanes] = group[moved]
            state.lane[group] = lanes
            state.window[group] = serial
        return window, members[np.argsort(lanes)]

    def _lasting_window(self, version: int, key_class: int, group: np.ndarray, num: int) -> tuple[int, Window]:
        """The version's window for contexts of this size, made or made larger when `group` does not fit."""
        known = self._windows.get((version, key_class))
        need = int(self._cache.length[group].max())
        if known is not None and known[1].num_lanes >= num and known[1].width >= need:
            return known
        longest = int(self._state.limit[group].max())
        ceiling = 128 * 4**key_class  # beyond, the sequence belongs to the next class
        width = max(need, min(longest, ceiling))
        lanes = num
        if known is not None:
            lanes, width = max(lanes, known[1].num_lanes), max(width, known[1].width)
        window = Window(
            self._config, -(-lanes // _LANES) * _LANES, -(-width // _WIDTH) * _WIDTH, self._dtype, self._device
        )
        self._num_windows += 1
        self._windows[version, key_class] = (self._num_windows, window)
        return self._num_windows, window

    def _load(self, window: Window, lanes: np.ndarray, slots: np.ndarray) -> None:
        cache = self._cache
        computed = cache.computed[slots]
        width = int(computed.max())
        rows = cache.rows[slots, :width]
        # Rows that are not computed yet hold anything, even another version's NaN: what is masked must be finite.
        rows[np.arange(width) >= computed[:, None]] = 0
        window.load(self._pool, lanes, rows)

    def _store(self, attentions: list[WindowAttention], rows: Tensor) -> None:
        begin = 0
        for attention in attentions:
            end = begin + attention.num_tokens
            attention.window.store(self._pool, attention.places, rows[begin:end])
            begin = end

    def _sample(self, version: int, slots: np.ndarray, logits_BV: Tensor) -> np.ndarray:
        """Draw the next token of each slot; returns the slots whose request has ended with it."""
        cache, state = self._cache, self._state
        length = cache.length[slots]
        noise = stream_uniforms(state.key[slots], state.generated[slots] + length)
        tokens, logprobs = sample(logits_BV, self._tensor(noise), **self._sampling)
        token_ids, token_logprobs = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(token_logprobs).all():
            group, member = cache.key(int(slots[~np.isfinite(token_logprobs)][0]))[1:]
            raise NonFiniteError(
                f"Version {version} gives logits that are not finite (in trajectory {group}.{member}); no token can be "
                "drawn from them. Its weights, or the KV that they made, are broken."
            )
        cache.tokens[slots, length] = token_ids
        cache.logprobs[slots, length] = token_logprobs
        cache.length[slots] = length + 1
        has_ended = self._is_stop[token_ids] | (length + 1 >= state.limit[slots])
        ended = slots[has_ended]
        if len(ended):
            running = self._running[version]
            is_over = np.zeros(len(state.limit), dtype=bool)
            is_over[ended] = True
            self._running[version] = running[~is_over[running]]
        return ended

    def _finish(self, slot: int, now: float) -> FinishedSegment:
        cache, state = self._cache, self._state
        request = self._live.pop(slot)
        begin, end = int(state.context[slot]), int(cache.length[slot])
        cache.park(slot)
        began = float(state.began[slot])
        return FinishedSegment(
            request=request.request,
            version=request.version,
            tokens=cache.tokens[slot, begin:end].copy(),
            logprobs=cache.logprobs[slot, begin:end].copy(),
            cached=int(state.cached[slot]),
            stopped=bool(self._is_stop[cache.tokens[slot, end - 1]]),
            seconds=now - began,
            queue_seconds=began - float(state.arrived[slot]),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        """The array's memory itself on the CPU, a copy on another device."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


class _Attend:
    """`model.Attend` over the groups of a pass, whose tokens lie end to end."""

    def __init__(self, attentions: list[WindowAttention]) -> None:
        self._attentions = attentions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self._attentions) == 1:
            return self._attentions[0](layer, q, k, v)
        outs, begin = [], 0
        for attention in self._attentions:
            end = begin + attention.num_tokens
            outs.append(attention(layer, q[begin:end], k[begin:end], v[begin:end]))
            begin = end
        return torch.cat(outs)
