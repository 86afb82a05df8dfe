"""The slow twin of the engine: one full forward pass per token, without cache, batch or memory limit."""

import numpy as np
import torch

from workers.generation.engine import Engine
from workers.generation.engine_requests import EngineRequest, FinishedSegment
from workers.generation.sampling import sample, uniforms
from workers.model import RopeTable, Weights, bind_weights, decode, init_flat, logits
from workers.model_config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=2048,
    qk_norm=True,
)
SEED = 11


def make_weights(version: int) -> Weights:
    """Five times the usual deviation: attention then matters, and tokens are far from each other in probability."""
    flat = init_flat(CONFIG, seed=100 + version)
    for tensor in bind_weights(flat, CONFIG).named.values():
        if tensor.dim() == 2:
            tensor.mul_(5.0)
    return bind_weights(flat, CONFIG)


WEIGHTS = [make_weights(version) for version in range(3)]
ROPE = RopeTable(CONFIG)


@torch.inference_mode()
def full_forward(version: int, tokens: np.ndarray) -> torch.Tensor:
    """Logits [T, V] of one sequence, all tokens at once."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(CONFIG.num_heads // CONFIG.num_kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / CONFIG.head_dim**0.5
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)

    ids = torch.from_numpy(tokens.astype(np.int64))
    hidden = decode(WEIGHTS[version], CONFIG, ROPE, ids, torch.arange(len(ids)), attend)
    return logits(WEIGHTS[version], hidden)


def make_engine(**options) -> Engine:
    engine = Engine(CONFIG, seed=SEED, **{"kv_tokens": 2000, "max_batch_tokens": 512, **options})
    engine._store.pool[1:] = float("nan")  # to read a row before it is written would show
    for version, weights in enumerate(WEIGHTS):
        engine.set_weights(version, weights)
    return engine


def request(
    number: int,
    context,
    max_tokens: int = 6,
    *,
    group: int | None = None,
    member: int = 0,
    version: int = 0,
    generated: int = 0,
    kv_max_age: int = 0,
) -> EngineRequest:
    tokens = np.asarray(context, dtype=np.int32)
    group = number if group is None else group
    return EngineRequest(number, group, member, version, tokens, max_tokens, generated, kv_max_age)


def run(engine: Engine, *requests: EngineRequest) -> list[FinishedSegment]:
    """Add all, step to the end; the segments in the order of the requests."""
    for one in requests:
        engine.add(one)
    return drain(engine, len(requests))


def drain(engine: Engine, expected: int) -> list[FinishedSegment]:
    finished: list[FinishedSegment] = []
    for _ in range(10_000):
        if not engine.has_work:
            break
        finished += engine.step()
    assert not engine.has_work, "the engine never ends"
    assert len(finished) == expected
    return sorted(finished, key=lambda segment: segment.request)


def assert_like_full_forward(asked: EngineRequest, segment: FinishedSegment, **sampling) -> None:
    """The same tokens as drawn one by one from full forward passes, and log-probs to 1e-5."""
    assert (segment.request, segment.version) == (asked.request, asked.version)
    assert segment.tokens.dtype == np.int32 and segment.logprobs.dtype == np.float32
    whole = np.concatenate((asked.tokens, segment.tokens))
    begin, num = len(asked.tokens), len(segment.tokens)
    positions = asked.generated + np.arange(num)
    noise = uniforms(SEED, np.full(num, asked.group), np.full(num, asked.member), positions)
    expected, logprobs = sample(full_forward(asked.version, whole)[begin - 1 : -1], torch.from_numpy(noise), **sampling)
    assert segment.tokens.tolist() == expected.tolist()
    np.testing.assert_allclose(segment.logprobs, logprobs.numpy(), atol=1e-5, rtol=0)


def random_context(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, CONFIG.vocab_size, length).astype(np.int32)


def free_all(engine: Engine, asked: list[EngineRequest], kv_tokens: int = 2000) -> None:
    for one in asked:
        engine.release(one.group, one.member)
    assert engine._cache.pool.num_free == kv_tokens
    assert not engine._cache.pool.references.any()
