"""Engine and learner compute what Hugging Face transformers does with the same weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workers.generation import engine as engine_module
from workers.generation.engine import Engine
from workers.generation.engine_requests import EngineRequest
from workers.learning import training as training_module
from workers.learning.packing import TrainingRows
from workers.learning.training import Trainee
from workers.model import RopeTable, bind_weights, init_flat
from workers.model_config import ModelConfig
from workers.rope_scaling import frequencies

pytest.importorskip("transformers", reason="transformers (extra `hf`) is not installed")
from tests.hf_twin import HFTwin  # only where transformers is

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_all_heads": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama_wide_heads": ("llama", {"head_dim": 20, "rms_norm_eps": 1e-3, "rope_theta": 500000.0}),
    "smollm2": ("llama", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4,
                          "tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 6, "head_dim": 12}),
    "mistral_window_tied": ("mistral", {"sliding_window": 1, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
    "qwen2_untied": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_biases": ("qwen3", {"head_dim": 6, "attention_bias": True, "num_key_value_heads": 4}),
    "qwen3_windows": ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5,
                                "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3_untied": ("smollm3", {"no_rope_layers": [1, 0, 0], "attention_bias": True, "mlp_bias": True,
                                   "tie_word_embeddings": False, "rope_theta": 5000000.0}),
    "smollm3_windows": ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}),
}  # fmt: skip
LONG = 4000
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_untruncated": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False,
        "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3,
    },
    "yarn_mscales": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "mscale": 1.0,
        "mscale_all_dim": 0.6,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip

# Where yarn's blend would begin before the first pair of features, end behind the last one, or have no length.
YARN_EDGES: dict[str, dict[str, Any]] = {
    "begins_early": {"original_max_position_embeddings": 100},
    "ends_in_the_second_half": {"original_max_position_embeddings": 4096, "rope_theta": 100.0},
    "ends_late": {"original_max_position_embeddings": 4096, "rope_theta": 10.0, "beta_fast": 500.0},
    "is_a_step": {"original_max_position_embeddings": 1024, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "is_a_step_at_the_first_pair": {"original_max_position_embeddings": 6},
}


def record_logits(monkeypatch, module) -> list[torch.Tensor]:
    """What the module's passes compute from now on, one [M, V] each."""
    seen: list[torch.Tensor] = []
    original: Callable[..., torch.Tensor] = module.logits

    def recording(*arguments: Any) -> torch.Tensor:
        scores = original(*arguments)
        seen.append(scores.detach().clone())
        return scores

    monkeypatch.setattr(module, "logits", recording)
    return seen


def decode_greedily(
    config: ModelConfig, flat: torch.Tensor, prompts: list[np.ndarray], num_new: int, **options: Any
) -> list[list[int]]:
    """Through the real engine, all together: prefill in chunks, then decode from the KV cache."""
    total = sum(len(prompt) + num_new for prompt in prompts)
    engine = Engine(
        config, seed=0, kv_tokens=total, max_batch_tokens=2048, temperature=0.0, dtype=flat.dtype, **options
    )
    engine.set_weights(0, bind_weights(flat, config))
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(number, number, 0, 0, prompt, num_new, 0))
    finished = []
    while engine.has_work:
        finished += engine.step()
    return [segment.tokens.tolist() for segment in sorted(finished, key=lambda segment: segment.request)]


def learner_logits(monkeypatch, config: ModelConfig, flat: torch.Tensor, sequences: list[list[int]]) -> torch.Tensor:
    """[sum of (T - 1), V], longest sequence first: every prediction of a real micro-batch."""
    initial = init_flat(config, seed=0)
    trainee = Trainee(config, initial, optimizer={}, loss={"name": "PolicyGradient"}, micro_batch_tokens=10**6)
    trainee.flat.copy_(flat)
    trainee.round_weights()
    versions = np.concatenate([np.append(np.zeros(len(sequence) - 1), -1) for sequence in sequences])
    nothing = np.zeros(len(versions), dtype=np.float32)
    rows = TrainingRows(
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        tokens=np.concatenate(sequences).astype(np.int32),
        weights=nothing,
        scales=nothing,
        behaviour_logprobs=nothing,
        versions=versions.astype(np.int32),
    )
    seen = record_logits(monkeypatch, training_module)
    trainee.forward_backward(rows, 0, zero_gradients=True)
    (scores,) = seen
    return scores


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_every_family_computes_what_transformers_computes(name, seed, monkeypatch):
    model_type, keys = MODELS[name]
    twin = HFTwin(model_type, seed=seed, **keys)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, twin.config.vocab_size, length).astype(np.int32) for length in (33, 21, 2)]
    num_new = 12
    steps = record_logits(monkeypatch, engine_module)
    sampled = decode_greedily(twin.config, twin.flat, prompts, num_new)
    wholes = [[*prompt.tolist(), *tokens] for prompt, tokens in zip(prompts, sampled, strict=True)]
    expected = [twin.logits(whole) for whole in wholes]
    for prompt, tokens, scores in zip(prompts, sampled, expected, strict=True):
        assert scores[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == tokens
    assert len(steps) == num_new
    theirs = [torch.stack([scores[len(p) - 1 + step] for p, scores in zip(prompts, expected, strict=True)])
              for step in range(num_new)]  # fmt: skip
    for step, scores in enumerate(steps):  # the engine orders the sequences of a pass as it likes
        apart = (theirs[step].unsqueeze(1) - scores).abs().amax(dim=2)
        assert apart.shape == (3, 3)
        assert apart.amin(dim=0).max() < 1e-4 and apart.amin(dim=1).max() < 1e-4
    learner = learner_logits(monkeypatch, twin.config, twin.flat, wholes)
    assert_same(learner, torch.cat([scores[:-1] for scores in expected]))


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_scaling_holds_to_the_4000th_position(name, monkeypatch):
    extent = {"max_position_embeddings": LONG, "num_hidden_layers": 1, "num_key_value_heads": 1}
    twin = HFTwin("llama", hidden_size=16, num_attention_heads=2, head_dim=16, rope_parameters=ROPES[name], **extent)
    num_new = 6
    prompt = np.random.default_rng(1).integers(0, twin.config.vocab_size, LONG - num_new).astype(np.int32)
    steps = record_logits(monkeypatch, engine_module)
    (sampled,) = decode_greedily(twin.config, twin.flat, [prompt], num_new)
    whole = [*prompt.tolist(), *sampled]
    expected = twin.logits(whole)
    assert expected[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == sampled
    assert_same(torch.cat(steps), expected[len(prompt) - 1 : -1])
    assert_same(learner_logits(monkeypatch, twin.config, twin.flat, [whole]), expected[:-1])


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("name", ROPES)
def test_rotations_are_those_of_transformers(name, theta, head_dim):
    heads = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim, "num_hidden_layers": 1}
    scaling = ROPES[name] | {"rope_theta": theta}
    twin = HFTwin("llama", max_position_embeddings=LONG, rope_parameters=scaling, **heads)
    rotary = twin.model.model.rotary_emb
    ours = torch.tensor(frequencies(twin.config.rope, theta, head_dim))
    torch.testing.assert_close(ours, rotary.inv_freq, rtol=2e-6, atol=0)
    assert twin.config.rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("name", YARN_EDGES)
def test_rotations_are_those_of_transformers_at_the_edges_of_yarn(name, head_dim):
    heads = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim, "num_hidden_layers": 1}
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0} | YARN_EDGES[name]
    twin = HFTwin("llama", max_position_embeddings=LONG, rope_parameters=scaling, **heads)
    ours = torch.tensor(frequencies(twin.config.rope, scaling["rope_theta"], head_dim))
    torch.testing.assert_close(ours, twin.model.model.rotary_emb.inv_freq, rtol=2e-6, atol=0)


def test_a_longer_table_says_the_same_of_the_first_positions():
    """The run cuts the table to its contexts: no rotation may depend on where it ends."""
    for name, scaling in ROPES.items():
        twin = HFTwin("llama", rope_parameters=scaling, max_position_embeddings=LONG, num_hidden_layers=1)
        fields = twin.config.to_fields()
        short = RopeTable(ModelConfig.from_fields(fields | {"max_positions": 100}))
        assert torch.equal(short.cos_P1h, RopeTable(twin.config).cos_P1h[:100]), name


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3", "smollm3"])
def test_bfloat16_models_agree_as_far_as_their_rounding_goes(name, monkeypatch):
    model_type, keys = MODELS[name]
    twin = HFTwin(model_type, dtype=torch.bfloat16, **keys)
    exact = HFTwin(model_type, **keys)
    exact.model.load_state_dict(twin.model.state_dict())
    prompt = np.random.default_rng(2).integers(0, twin.config.vocab_size, 30).astype(np.int32)
    steps = record_logits(monkeypatch, engine_module)
    (sampled,) = decode_greedily(twin.config, twin.flat, [prompt], 8)
    whole = [*prompt.tolist(), *sampled]
    expected = exact.logits(whole)
    theirs = (twin.logits(whole) - expected)[len(prompt) - 1 : -1]
    ours = torch.cat(steps) - expected[len(prompt) - 1 : -1]
    assert 0 < theirs.abs().mean() < 0.1
    assert ours.abs().mean() < 1.5 * theirs.abs().mean()  # as near to float32 arithmetic on the same weights as theirs
