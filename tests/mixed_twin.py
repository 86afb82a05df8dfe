"""The slow twin of a KV cache whose tokens were computed by several policy versions: one sequence, dense, no pool."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from pipeline.processes.sampler.sampler_client import SegmentResult
from tests.engine_twin import CONFIG, SEED, make_weights
from workers.generation.engine import Engine
from workers.generation.engine_requests import EngineRequest, FinishedSegment
from workers.generation.sampling import sample, uniforms
from workers.model import RopeTable, Weights, decode, logits
from workers.model_config import ModelConfig

VERSIONS = [make_weights(version) for version in range(8)]


class MixedTwin:
    """KV of one sequence: `extend` computes tokens under one version over whatever computed those before."""

    def __init__(self, config: ModelConfig) -> None:
        self.length = 0
        self._config = config
        self._rope = RopeTable(config)
        nothing = torch.zeros(0, config.num_kv_heads, config.head_dim)
        self._kv = [(nothing, nothing) for _ in range(config.num_layers)]

    @torch.inference_mode()
    def extend(self, weights: Weights, tokens: np.ndarray) -> torch.Tensor:
        """tokens [n] after those there -> logits [n, V]."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = (torch.cat(pair) for pair in zip(self._kv[layer], (k, v), strict=True))
            self._kv[layer] = (keys, values)
            repeat = self._config.num_heads // self._config.num_kv_heads
            scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(repeat, dim=1))
            scores = scores / self._config.head_dim**0.5
            later = torch.ones(len(q), len(keys), dtype=torch.bool).triu(1 + self.length)
            shares = scores.masked_fill(later, float("-inf")).softmax(-1)
            return torch.einsum("hqk,khd->qhd", shares, values.repeat_interleave(repeat, dim=1))

        ids = torch.from_numpy(tokens.astype(np.int64))
        positions = torch.arange(self.length, self.length + len(ids))
        hidden = decode(weights, self._config, self._rope, ids, positions, attend)
        self.length += len(ids)
        return logits(weights, hidden)


def logits_over(
    versions: list[int],
    tokens: np.ndarray,
    weights: Sequence[Weights] | Mapping[int, Weights] = VERSIONS,
    config: ModelConfig = CONFIG,
) -> torch.Tensor:
    """Logits [T, V] of `tokens` [T], each computed by the version of the same index, over the KV of those before."""
    twin, parts, begin = MixedTwin(config), [], 0
    while begin < len(tokens):
        end = begin + 1
        while end < len(tokens) and versions[end] == versions[begin]:
            end += 1
        parts.append(twin.extend(weights[versions[begin]], tokens[begin:end]))
        begin = end
    return torch.cat(parts)


class Recomputed:
    """What one trajectory's KV must be, told by nothing but its segments; each segment is proved from it."""

    def __init__(
        self,
        weights: Sequence[Weights] | Mapping[int, Weights] = VERSIONS,
        config: ModelConfig = CONFIG,
        seed: int = SEED,
    ) -> None:
        self.kv_versions: list[int] = []  # by position
        self.tokens = np.zeros(0, dtype=np.int32)  # those whose KV is there, and the last one, which is not fed yet
        self._weights, self._config, self._seed = weights, config, seed

    def prove(self, asked: EngineRequest, segment: FinishedSegment | SegmentResult) -> None:
        """Tokens and log-probs (to 1e-4) are those of the version named over KV of exactly the versions named."""
        version, cached = asked.version, segment.cached
        assert segment.version == version
        assert 0 <= version - segment.kv_version <= asked.kv_max_age
        whole = np.concatenate((asked.tokens, np.asarray(segment.tokens, dtype=np.int32)))
        kept = [version] * cached
        if segment.kv_version < version:  # what it had itself; else it may as well be its group's prompt
            kept = self.kv_versions[:cached]
            assert len(kept) == cached > 0 and self.tokens[:cached].tolist() == whole[:cached].tolist()
            assert kept[0] == min(kept) == segment.kv_version
        begin, num = len(asked.tokens), len(segment.tokens)
        self.kv_versions = kept + [version] * (len(whole) - 1 - cached)
        self.tokens = whole
        logits_TV = logits_over(self.kv_versions, whole[:-1], self._weights, self._config)[begin - 1 :]
        positions = asked.generated + np.arange(num)
        noise = uniforms(self._seed, np.full(num, asked.group), np.full(num, asked.member), positions)
        expected, logprobs = sample(logits_TV, torch.from_numpy(noise))
        assert list(segment.tokens) == expected.tolist()
        np.testing.assert_allclose(segment.logprobs, logprobs.numpy(), atol=1e-4, rtol=0)


def make_versions_engine(versions: Iterable[int] | None = None, **options) -> Engine:
    """An engine that knows `versions` (None: all); to read KV before it is written would show."""
    engine = Engine(CONFIG, seed=SEED, **{"kv_tokens": 2000, "max_batch_tokens": 512, **options})
    engine._store.pool[1:] = float("nan")
    for version in range(len(VERSIONS)) if versions is None else versions:
        engine.set_weights(version, VERSIONS[version])
    return engine
