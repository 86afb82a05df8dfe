"""Generation of segments: continuous batching over (policy version, sequence), one forward pass a version and step.

A request brings a trajectory's whole context; the engine keeps the KV of earlier requests and of the group's common
prompt, so that mostly only new tokens are computed (`kv_cache.py`). `step` starts waiting requests as memory
allows, oldest first, and takes one pass for each version that has work: decode and prefill together, prefill in
chunks of `max_batch_tokens`. Short of memory it evicts the KV of trajectories between requests, then takes back the
youngest running request, which is computed again later: its tokens stay, and noise that is a function of the position
makes the outcome the same. No request is lost.

A request may build on KV that older versions computed (`kv_max_age`); it says so with the oldest of them, the KV's
anchor. Taken back, such a request can only go on over KV of its own version, and one segment must not be sampled over
two: its undelivered tokens are dropped, and it starts again from its context.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from workers.errors import NonFiniteError
from workers.generation.batching import share_budget
from workers.generation.engine_requests import EngineError, EngineRequest, FinishedSegment, SeatState, check_request
from workers.generation.kv_cache import KVTables
from workers.generation.kv_store import KVStore
from workers.generation.sampling import sample, stream_keys, stream_uniforms
from workers.model import RopeTable, Weights, decode, logits
from workers.model_config import ModelConfig

_HEADROOM_TOKENS = 16  # rows that a running request may still want before another one is started


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
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`kv_tokens`: capacity of the KV pool. The windows of running sequences need about as much again, when all
        run. beat: called in each layer of a pass: a sign of life.
        """
        if kv_tokens < 1 or max_batch_tokens < 1:
            raise EngineError(f"kv_tokens is {kv_tokens} and max_batch_tokens {max_batch_tokens}; both must be >= 1.")
        self._config = config
        self._seed = seed
        self._sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._kv_tokens = kv_tokens
        self._max_batch_tokens = max_batch_tokens
        self._is_stop = np.zeros(config.vocab_size, dtype=bool)
        for token in stop_ids:
            if not 0 <= token < config.vocab_size:
                raise EngineError(
                    f"Stop id {token} is not in the vocabulary, [0, {config.vocab_size}); correct stop_ids."
                )
            self._is_stop[token] = True
        device = torch.device(device)
        self._rope = RopeTable(config, device, dtype)
        self._cache = KVTables(kv_tokens)
        self._store = KVStore(config, self._cache, dtype, device, beat)
        self._state = SeatState(self._cache.num_seats)
        self._weights: dict[int, Weights] = {}
        self._live: dict[int, EngineRequest] = {}  # by seat
        self._waiting: deque[int] = deque()  # seats, oldest request first
        self._running: dict[int, np.ndarray] = {}  # version -> seats
        self._num_arrivals = 0
        self.num_computed = 0  # tokens that went through the model

    @property
    def num_trajectories(self) -> int:
        """Trajectories that have asked and are not yet released, those between two requests too."""
        return self._cache.num_trajectories

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    def set_weights(self, version: int, weights: Weights) -> None:
        """Make `version` known. The tensors are used in place: they must not change until `drop_version`."""
        if version in self._weights:
            raise EngineError(f"Version {version} has weights already; call drop_version before new ones are set.")
        self._weights[version] = weights

    def drop_version(self, version: int) -> None:
        """Forget a version's weights and prompts; EngineError while a request runs or waits under it.

        The KV of trajectories between two requests stays, as a newer version may build on it.
        """
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
        self._store.drop_version(version)
        self._cache.drop_version(version)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; a refused one (EngineError) changes nothing."""
        num_context, cache = len(request.tokens), self._cache
        check_request(request, self._weights, self._kv_tokens, self._config)
        known = cache.seat_of(request.group, request.member)
        if known is not None and known in self._live:
            raise EngineError(
                f"{request.name} comes while request {self._live[known].request} of the same trajectory is unfinished; "
                "a trajectory has one request at a time."
            )
        seat = cache.open(
            request.version,
            request.group,
            request.member,
            request.tokens,
            num_context + request.max_tokens,
            request.kv_max_age,
        )
        state = self._state
        if cache.num_seats > len(state.limit):
            state.grow(cache.num_seats)
        state.context[seat] = num_context
        state.limit[seat] = num_context + request.max_tokens
        state.generated[seat] = request.generated - num_context
        state.arrival[seat] = self._num_arrivals
        state.arrived[seat] = perf_counter()
        state.began[seat] = 0.0
        state.cached[seat] = -1
        state.evictions[seat] = state.dropped[seat] = 0
        self._num_arrivals += 1
        self._live[seat] = request
        self._waiting.append(seat)

    def release(self, group: int, member: int) -> int | None:
        """The trajectory has ended: free its KV. A request still live is cancelled, and its id returned: no segment
        comes.
        """
        seat = self._cache.release(group, member)
        if seat is None:
            return None
        request = self._live.pop(seat, None)
        if request is None:
            return None
        if seat in self._waiting:
            self._waiting.remove(seat)
        else:
            running = self._running[request.version]
            self._running[request.version] = running[running != seat]
        return request.request

    @torch.inference_mode()
    def step(self) -> list[FinishedSegment]:
        """Start what fits and take one pass for each version with work; the segments that ended."""
        self._start_waiting()
        self._give_rows()
        finished: list[FinishedSegment] = []
        for version, seats in self._running.items():
            if len(seats):
                done = self._pass(version, seats)
                if len(done):
                    now = perf_counter()
                    finished += [self._finish(seat, now) for seat in done.tolist()]
        return finished

    def _start_waiting(self) -> None:
        """Oldest first; what does not fit holds back those behind it, so that none waits for ever."""
        if not self._waiting:
            return
        cache, state = self._cache, self._state
        headroom = 0
        for seats in self._running.values():
            headroom += int(np.minimum(state.limit[seats] - cache.length[seats], _HEADROOM_TOKENS).sum())
        started: list[int] = []
        while self._waiting and cache.start(self._waiting[0], headroom):
            seat = self._waiting.popleft()
            started.append(seat)
            headroom += min(int(state.limit[seat] - cache.length[seat]), _HEADROOM_TOKENS)
        if not started:
            return
        seats = np.array(started)
        self._store.forget(seats)
        first = seats[state.cached[seats] < 0]
        state.cached[first] = cache.computed[first]
        if cache.borrowed:  # what another member computes counts as cached: it is not this request's work
            for seat in first.tolist():
                state.cached[seat] = cache.borrowed.get(seat, state.cached[seat])
        keys = [cache.key(seat) for seat in started]
        _, groups, members = np.array(keys, dtype=np.int64).T
        state.key[seats] = stream_keys(self._seed, groups, members)
        versions = np.array([key[0] for key in keys])
        for version in dict.fromkeys(versions.tolist()):
            new = seats[versions == version]
            running = self._running.get(version)
            self._running[version] = new if running is None else np.concatenate((running, new))

    def _give_rows(self) -> None:
        """A pool row for each token sampled in the last step; without room, take back the youngest requests."""
        cache = self._cache
        running = [seats for seats in self._running.values() if len(seats)]
        if not running:
            return
        seats = running[0] if len(running) == 1 else np.concatenate(running)
        need = seats[cache.allocated[seats] < cache.length[seats]]
        if len(need) > cache.pool.num_free and not cache.make_room(len(need)):
            need = self._take_back(seats, need)
        if len(need):
            cache.extend(need)

    def _take_back(self, seats: np.ndarray, need: np.ndarray) -> np.ndarray:
        """Stop running requests, youngest first, until each left gets its row; returns those still in need.

        The oldest is never taken: alone it fits, as `add` has checked, so every step brings it forward.
        """
        youngest_first = seats[np.argsort(-self._state.arrival[seats])]
        for seat in youngest_first[:-1].tolist():
            if self._cache.make_room(len(need)):
                break
            version = self._live[seat].version
            self._cache.pause(seat)
            self._state.evictions[seat] += 1
            if self._cache.anchor[seat] != version:  # over other KV other tokens may follow, and other log-probs
                self._state.dropped[seat] += self._cache.length[seat] - self._state.context[seat]
                self._cache.length[seat] = self._state.context[seat]
                self._state.cached[seat] = -1
            self._waiting.appendleft(seat)
            self._running[version] = self._running[version][self._running[version] != seat]
            need = need[need != seat]
        assert self._cache.make_room(len(need)), "one running request alone does not fit into the KV pool"
        return need

    def _plan(self, seats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """seats -> those that take part in the pass, and how many tokens each takes."""
        cache = self._cache
        pending = cache.length[seats] - cache.computed[seats]
        if cache.borrowed:
            for index, seat in enumerate(seats.tolist()):
                if seat in cache.borrowed:
                    end = cache.frontier(seat)  # advances `computed`
                    pending[index] = end - cache.computed[seat]
        takes = share_budget(pending, self._max_batch_tokens)
        if takes.all():
            return seats, takes
        return seats[takes > 0], takes[takes > 0]

    def _pass(self, version: int, running: np.ndarray) -> np.ndarray:
        """One forward pass; writes KV, tokens and log-probs; returns the seats whose request has ended."""
        cache, state, store = self._cache, self._state, self._store
        seats, takes = self._plan(running)
        assert len(seats), "a version has running requests, but none of them can compute anything"
        began = state.began[seats]
        if not began.all():
            state.began[seats[began == 0.0]] = perf_counter()
        work = store.begin(version, seats, takes, state.limit[seats])
        seats = work.seats
        if len(seats) == len(running):
            self._running[version] = seats  # the order of the lanes: the next pass need not sort again
        tokens = cache.tokens[seats[work.sequence], work.position]
        weights = self._weights[version]
        hidden = decode(weights, self._config, self._rope, store.tensor(tokens), store.tensor(work.position), work)
        store.end(work)
        self.num_computed += len(tokens)
        has_token = cache.computed[seats] == cache.length[seats]
        if not has_token.all():
            seats = seats[has_token]
        if not len(seats):
            return seats
        if len(seats) < len(tokens):
            hidden = hidden.index_select(0, store.tensor((np.cumsum(work.takes) - 1)[has_token]))
        return self._sample(version, seats, logits(weights, hidden))

    def _sample(self, version: int, seats: np.ndarray, logits_BV: Tensor) -> np.ndarray:
        """Draw the next token of each seat; returns the seats whose request has ended with it."""
        cache, state = self._cache, self._state
        length = cache.length[seats]
        noise = stream_uniforms(state.key[seats], state.generated[seats] + length)
        tokens, logprobs = sample(logits_BV, self._store.tensor(noise), **self._sampling)
        token_ids, token_logprobs = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(token_logprobs).all():
            group, member = cache.key(int(seats[~np.isfinite(token_logprobs)][0]))[1:]
            advice = (
                "The update that made its weights was too large: lower the learning rate, or set grad_clip_norm."
                if version
                else "The first weights are broken, or too large for their dtype: look at the model."
            )
            raise NonFiniteError(
                f"Version {version} gives logits that are not finite (in trajectory {group}.{member}), from which no "
                f"token can be drawn. {advice}"
            )
        cache.tokens[seats, length] = token_ids
        cache.logprobs[seats, length] = token_logprobs
        cache.length[seats] = length + 1
        has_ended = self._is_stop[token_ids] | (length + 1 >= state.limit[seats])
        ended = seats[has_ended]
        if len(ended):
            running = self._running[version]
            is_over = np.zeros(len(state.limit), dtype=bool)
            is_over[ended] = True
            self._running[version] = running[~is_over[running]]
        return ended

    def _finish(self, seat: int, now: float) -> FinishedSegment:
        cache, state = self._cache, self._state
        request = self._live.pop(seat)
        begin, end = int(state.context[seat]), int(cache.length[seat])
        cache.park(seat)
        began = float(state.began[seat])
        return FinishedSegment(
            request=request.request,
            version=request.version,
            kv_version=int(cache.anchor[seat]),
            tokens=cache.tokens[seat, begin:end].copy(),
            logprobs=cache.logprobs[seat, begin:end].copy(),
            cached=int(state.cached[seat]),
            stopped=bool(self._is_stop[cache.tokens[seat, end - 1]]),
            seconds=now - began,
            queue_seconds=began - float(state.arrived[seat]),
            evictions=int(state.evictions[seat]),
            dropped=int(state.dropped[seat]),
        )
