"""What the engine is asked and what it answers, and its notes on each request while it is live."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from shm.errors import HeadwayError
from workers.model_config import ModelConfig


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
    kv_max_age: int = 0

    @property
    def name(self) -> str:
        """For errors."""
        return f"Request {self.request} (trajectory {self.group}.{self.member})"


@dataclass(slots=True)
class FinishedSegment:
    """One request's outcome; fields as in `messages.Segment`."""

    request: int
    version: int
    kv_version: int
    tokens: np.ndarray  # int32
    logprobs: np.ndarray  # float32, at the sampling temperature, of the full distribution
    cached: int
    stopped: bool
    seconds: float
    queue_seconds: float
    evictions: int
    dropped: int


class SeatState:
    """What the engine knows of each seat of the KV cache, as arrays over seats; valid while a request is live."""

    def __init__(self, num_seats: int) -> None:
        self.context = np.zeros(num_seats, dtype=np.int64)  # length of the request's context
        self.limit = np.zeros(num_seats, dtype=np.int64)  # length at which max_tokens are reached
        self.generated = np.zeros(num_seats, dtype=np.int64)  # generated position minus sequence position
        self.key = np.zeros(num_seats, dtype=np.uint64)  # noise stream
        self.arrival = np.zeros(num_seats, dtype=np.int64)  # count of requests, never reset: the order of all queues
        self.arrived = np.zeros(num_seats)  # seconds
        self.began = np.zeros(num_seats)  # seconds; 0 before the first pass
        self.cached = np.zeros(num_seats, dtype=np.int64)  # -1 before the first start
        self.evictions = np.zeros(num_seats, dtype=np.int64)  # of the request that is live
        self.dropped = np.zeros(num_seats, dtype=np.int64)  # tokens of its own that went with them

    def grow(self, num_seats: int) -> None:
        """Add seats; the entries of those there stay."""
        for name, table in vars(self).items():
            setattr(self, name, np.concatenate((table, np.zeros(num_seats - len(table), dtype=table.dtype))))


def check_request(request: EngineRequest, versions: Collection[int], kv_tokens: int, config: ModelConfig) -> None:
    """Raise EngineError for a request that could never run; `versions` are those with weights."""
    name, num_context = request.name, len(request.tokens)
    if request.version not in versions:
        raise EngineError(f"{name} asks for version {request.version}; the engine holds {sorted(versions)}.")
    if request.kv_max_age < 0:
        raise EngineError(f"{name} has kv_max_age {request.kv_max_age}; 0 allows KV of its own version only.")
    if num_context == 0 or request.max_tokens < 1:
        raise EngineError(
            f"{name} has {num_context} context tokens and max_tokens {request.max_tokens}; both must be >= 1."
        )
    need = num_context + request.max_tokens - 1  # the last token is never fed back
    available = min(kv_tokens, config.max_positions)
    if need > available:
        what = "KV cache" if kv_tokens <= config.max_positions else "model's position table"
        raise EngineError(
            f"{name} needs {need} tokens ({num_context} of context and {request.max_tokens} new ones), and the "
            f"{what} has room for {available}. Shorten its budget, or make that larger."
        )
    # Seen as unsigned, a negative id is too large as well.
    if request.tokens.dtype != np.int32 or int(request.tokens.view(np.uint32).max()) >= config.num_ids:
        raise EngineError(
            f"{name} has {request.tokens.dtype} token ids from {request.tokens.min()} to {request.tokens.max()}; "
            f"they must be int32 and in [0, {config.num_ids})."
        )
