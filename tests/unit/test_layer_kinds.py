"""Windows, unrotated layers and ids without a token: engine and learner against the slow float64 decoder."""

import math

import numpy as np
import pytest
import torch
from reference_decoder import reference_logits

from tests.engine_twin import drain, request
from workers.generation import kv_window
from workers.generation.engine import Engine
from workers.generation.engine_requests import EngineError
from workers.generation.sampling import sample
from workers.learning import packed_attention
from workers.learning.packing import RowsError, TrainingRows
from workers.learning.training import Trainee
from workers.model import bind_weights, init_flat
from workers.model_config import ModelConfig, layout

BASE = {
    "vocab_size": 29,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "max_positions": 128,
}
KINDS = {
    "windows": ModelConfig(**BASE, layer_windows=(5, 5, 5)),
    "some_windows": ModelConfig(**BASE, layer_windows=(0, 1, 9)),
    "nope": ModelConfig(**BASE, nope_layers=(1,), qkv_bias=True),
    "nope_within_windows": ModelConfig(**BASE, nope_layers=(0, 2), layer_windows=(3, 0, 200), qk_norm=True),
    "fewer_ids": ModelConfig(**BASE, num_token_ids=21),
    "holes": ModelConfig(**BASE, num_token_ids=27, unused_ids=(0, 8, 26), tie_embeddings=False),
    "everything": ModelConfig(
        **BASE, layer_windows=(4, 0, 7), nope_layers=(1,), num_token_ids=25, unused_ids=(3,), mlp_bias=True
    ),
}
# Which of the sampler's ways to attend a pass takes depends on its size; so that each is taken with small ones:
WAYS = {
    "as_usual": {},
    "no_table": {"_TABLE_WIDTH": 0},
    "fused": {"_BMM_QUERIES": 0},
    "fused_in_blocks": {"_BMM_QUERIES": 0, "_MASK_CELLS": 300},
}


def random_flat(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(layout(config).num_elements, dtype=torch.float64, generator=generator) + 0.1


def existing_ids(config, rng, length):
    ids = np.setdiff1d(np.arange(config.num_ids), config.unused_ids)
    return rng.choice(ids, length).astype(np.int32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_the_engine_samples_from_the_references_logits(config, way, monkeypatch):
    for name, value in WAYS[way].items():
        monkeypatch.setattr(kv_window, name, value)
    rng = np.random.default_rng(3)
    flat = random_flat(config)
    named = bind_weights(flat, config).named
    engine = Engine(config, seed=1, kv_tokens=400, max_batch_tokens=16, dtype=torch.float64)
    engine._store.pool[1:] = float("nan")
    engine.set_weights(0, bind_weights(flat, config))
    asked = [request(i, existing_ids(config, rng, n), m) for i, (n, m) in enumerate([(1, 12), (30, 4), (7, 15)])]
    asked.append(request(3, asked[1].tokens, 9, group=1, member=1))  # shares the prompt's KV with another
    for one in asked:
        engine.add(one)
    segments = drain(engine, len(asked))
    assert segments[3].cached == len(asked[3].tokens) - 1
    again = request(9, np.concatenate((asked[2].tokens, segments[2].tokens, asked[0].tokens)), 6, group=2)
    engine.add(again)
    for one, segment in zip([*asked, again], [*segments, *drain(engine, 1)], strict=True):
        whole = [*one.tokens.tolist(), *segment.tokens.tolist()]
        expected = torch.log_softmax(reference_logits(named, config, whole), dim=-1)
        found = expected[len(one.tokens) - 1 : -1].gather(1, torch.tensor(segment.tokens).long().unsqueeze(1))
        np.testing.assert_allclose(segment.logprobs, found.squeeze(1), atol=1e-6)
    assert segment.cached == len(asked[2].tokens) + len(segments[2].tokens) - 1


@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_the_learners_gradient_of_every_tensor_is_the_references(config, block, monkeypatch):
    monkeypatch.setattr(packed_attention, "_BLOCK_QUERIES", block)
    rng = np.random.default_rng(5)
    sequences = [existing_ids(config, rng, length) for length in (11, 3, 6)]
    flat = random_flat(config)
    trainee = Trainee(config, init_flat(config, seed=0), optimizer={}, loss={"name": "PolicyGradient"})
    trainee.flat.copy_(flat)
    weights = [rng.normal(size=len(sequence) - 1) for sequence in sequences]
    trainee.forward_backward(rows_of(sequences, weights), 0, zero_gradients=True)
    named = bind_weights(flat, config).named
    for tensor in named.values():
        tensor.requires_grad_(True)
    loss = torch.zeros((), dtype=torch.float64)
    for sequence, weight in zip(sequences, weights, strict=True):
        logprobs = torch.log_softmax(reference_logits(named, config, sequence.tolist())[:-1], dim=-1)
        chosen = logprobs.gather(1, torch.tensor(sequence[1:]).long().unsqueeze(1)).squeeze(1)
        loss = loss - (torch.tensor(weight) * chosen).sum()
    loss.backward()
    for name, found in bind_weights(trainee.flat_grad, config).named.items():
        expected = named[name].grad
        assert expected.isfinite().all() and expected.abs().max() > 0, name
        torch.testing.assert_close(
            found.double(), expected, rtol=2e-3, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


def rows_of(sequences, weights):
    """Every token but the first was sampled, with the given loss weights."""
    last = np.array([-1])
    columns = [np.concatenate([np.append(weight, 0.0) for weight in weights]).astype(np.float32)]
    versions = np.concatenate([np.concatenate((np.zeros(len(s) - 1, dtype=np.int64), last)) for s in sequences])
    return TrainingRows(
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        tokens=np.concatenate(sequences).astype(np.int32),
        weights=columns[0],
        scales=(versions >= 0).astype(np.float32),
        behaviour_logprobs=np.zeros(len(versions), dtype=np.float32),
        versions=versions.astype(np.int32),
    )


@pytest.mark.parametrize("name", ["fewer_ids", "holes"])
def test_rows_of_the_head_without_a_token_get_no_gradient_and_no_nan(name):
    config = KINDS[name]
    entropy = {"entropy_coefficient": 0.1, "kl_coefficient": 0.1, "temperature": 0.7}
    trainee = Trainee(config, init_flat(config, seed=0), optimizer={}, loss={"name": "CISPO"}, **entropy)
    sequences = [existing_ids(config, np.random.default_rng(7), 12)]
    metrics = trainee.forward_backward(rows_of(sequences, [np.ones(11)]), 0, zero_gradients=True)
    gradients = bind_weights(trainee.flat_grad, config).named
    assert trainee.flat_grad.isfinite().all() and math.isfinite(metrics["train/entropy"])
    assert metrics["train/entropy"] <= math.log(config.num_ids - len(config.unused_ids)) + 1e-6
    head = gradients["head" if name == "holes" else "embed"]
    lost = [*config.unused_ids, *range(config.num_ids, config.vocab_size)]
    assert (head[lost] == 0).all()
    kept = sorted(set(range(config.vocab_size)) - set(lost))
    assert (head[kept].abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("narrowed", [{}, {"top_p": 0.999}, {"top_k": 28}])
def test_ids_without_a_token_are_never_sampled_however_likely(temperature, narrowed):
    config = KINDS["holes"]
    lost = [*config.unused_ids, *range(config.num_ids, config.vocab_size)]
    flat = random_flat(config).float()
    weights = bind_weights(flat, config)
    weights.head[lost] = 1e4 * weights.head[lost].sign()
    engine = Engine(config, seed=1, kv_tokens=4000, max_batch_tokens=4000, temperature=temperature, **narrowed)
    engine.set_weights(0, weights)
    for number in range(40):
        engine.add(request(number, [1, 2, 3], 20))
    sampled = {int(token) for segment in drain(engine, 40) for token in segment.tokens}
    assert len(sampled) > (0 if temperature == 0 else 5) and not sampled & set(lost)


def test_a_prompt_or_row_with_an_id_beyond_the_tokens_is_refused():
    config = KINDS["fewer_ids"]
    engine = Engine(config, seed=1, kv_tokens=40, max_batch_tokens=40)
    engine.set_weights(0, bind_weights(random_flat(config).float(), config))
    with pytest.raises(EngineError, match=r"in \[0, 21\)"):
        engine.add(request(0, [3, 21], 2))
    trainee = Trainee(config, init_flat(config, seed=0), optimizer={}, loss={"name": "CISPO"})
    with pytest.raises(RowsError, match=r"token ids lie in \[0, 21\)"):
        trainee.forward_backward(rows_of([np.array([3, 4, 21])], [np.ones(2)]), 0, zero_gradients=True)


def test_sampling_at_an_edge_of_the_noise_takes_an_id_that_exists():
    config = KINDS["holes"]
    scores = torch.zeros(2, config.num_ids)
    scores[:, list(config.unused_ids)] = -math.inf
    tokens, logprobs = sample(scores, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 25]  # 0 and 26 are holes
    assert logprobs.tolist() == pytest.approx([-math.log(24)] * 2)
