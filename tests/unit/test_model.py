"""The decoder against a slow float64 one, forward and backward, over the families it serves."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from reference_decoder import reference_logits

from workers.model import RopeTable, bind_weights, decode, init_flat, logits
from workers.model_config import TINY, ModelConfig, ModelConfigError, layout, parameter_shapes

LLAMA = ModelConfig(
    vocab_size=29,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=20,
    max_positions=64,
)
FAMILIES = {
    "llama": LLAMA,
    "untied_one_kv_head": replace(LLAMA, tie_embeddings=False, num_kv_heads=1, rope_theta=500000.0),
    "qwen2": replace(LLAMA, qkv_bias=True, num_kv_heads=4, rms_norm_eps=1e-6),
    "qwen3": replace(LLAMA, qk_norm=True, tie_embeddings=False),
    "every_option": replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True),
}
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [27], [18, 28, 0, 28, 18]]


def causal_attention(lengths):
    """Each packed sequence by itself."""

    def attend(layer, q, k, v):
        pieces = []
        for one_q, one_k, one_v in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            group = one_q.shape[1] // one_k.shape[1]
            wide_k, wide_v = one_k.repeat_interleave(group, 1), one_v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", one_q, wide_k) / math.sqrt(one_q.shape[2])
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            pieces.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), wide_v))
        return torch.cat(pieces)

    return attend


def random_flat(config, dtype=torch.float64):
    """No zero bias and no norm of exactly 1, which would hide a tensor that is never read."""
    generator = torch.Generator().manual_seed(7)
    return (0.3 * torch.randn(layout(config).num_elements, dtype=torch.float64, generator=generator) + 0.1).to(dtype)


def packed_logits(weights, config, dtype):
    tokens = torch.tensor([token for sequence in SEQUENCES for token in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in SEQUENCES])
    attend = causal_attention([len(sequence) for sequence in SEQUENCES])
    hidden = decode(weights, config, RopeTable(config, dtype=dtype), tokens, positions, attend)
    return logits(weights, hidden)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_packed_logits_are_those_of_each_sequence_alone(config):
    flat = random_flat(config)
    named = bind_weights(flat, config).named
    expected = torch.cat([reference_logits(named, config, sequence) for sequence in SEQUENCES])
    torch.testing.assert_close(packed_logits(bind_weights(flat, config), config, torch.float64), expected)
    narrow = bind_weights(flat.float(), config)
    found = packed_logits(narrow, config, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_gradient_of_every_tensor_is_the_references(config):
    flat = random_flat(config)
    ours, theirs = bind_weights(flat, config), bind_weights(flat.clone(), config)
    for named in (ours.named, theirs.named):
        for parameter in named.values():
            parameter.requires_grad_(True)
    probe = torch.randn(14, config.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (packed_logits(ours, config, torch.float64) * probe).sum().backward()
    expected = torch.cat([reference_logits(theirs.named, config, sequence) for sequence in SEQUENCES])
    (expected * probe).sum().backward()
    for name, parameter in ours.named.items():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(
            parameter.grad, theirs.named[name].grad, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_rope_keeps_float32_precision_at_far_positions():
    table = RopeTable(replace(LLAMA, max_positions=100_001))
    cos, sin = table.at(torch.tensor([100_000]))
    for i in range(4):
        angle = 100_000 * 10000.0 ** (-2 * i / 8)
        assert cos[0, 0, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert cos[0, 0, 4 + i] == cos[0, 0, i]
        assert sin[0, 0, 4 + i].item() == pytest.approx(math.sin(angle), abs=1e-7)
        assert sin[0, 0, i] == -sin[0, 0, 4 + i]


def test_weights_are_views_of_the_flat_buffer_and_cover_it():
    flat = torch.zeros(layout(LLAMA).num_elements)
    weights = bind_weights(flat, LLAMA)
    for number, tensor in enumerate(weights.named.values(), start=1):
        tensor.fill_(number)
    assert weights.head is weights.embed
    covered = torch.cat([torch.full((tensor.numel(),), n + 1.0) for n, tensor in enumerate(weights.named.values())])
    assert torch.equal(flat, covered)
    flat.fill_(-1)
    assert all((tensor == -1).all() for tensor in weights.named.values())
    untied = replace(LLAMA, tie_embeddings=False)
    assert "head" in bind_weights(torch.zeros(layout(untied).num_elements), untied).named


def test_a_flat_buffer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        bind_weights(torch.zeros(5), LLAMA)


def test_layout_puts_all_matrices_first():
    for config in FAMILIES.values():
        dimensions = [len(shape) for _, shape in parameter_shapes(config)]
        assert dimensions == sorted(dimensions, reverse=True)
        matrix_elements = sum(math.prod(shape) for _, shape in parameter_shapes(config) if len(shape) == 2)
        assert layout(config).num_matrix_elements == matrix_elements


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = init_flat(TINY, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(init_flat(TINY, seed=5), first)
    assert not torch.equal(init_flat(TINY, seed=6), first)


def test_initial_weights_keep_variances_whatever_the_width():
    config = replace(TINY, num_layers=8, qkv_bias=True)
    named = bind_weights(init_flat(config, seed=0), config).named
    for name in ("layers.3.qkv", "layers.3.gate_up"):
        assert named[name].std().item() == pytest.approx(config.hidden_size**-0.5, rel=0.05), name
    assert named["embed"].std().item() == pytest.approx(0.1, rel=0.05)
    assert named["layers.3.out"].std().item() == pytest.approx(0.2, rel=0.05)
    assert named["layers.3.down"].std().item() == pytest.approx(0.2, rel=0.05)
    assert (named["layers.3.mlp_norm"] == 1).all() and (named["final_norm"] == 1).all()
    assert (named["layers.3.qkv_bias"] == 0).all()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_kv_heads": 3}, "4 query heads and 3 key/value heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": 10**6}, "num_layers is 1000000; .* from 1 to 10,000"),
        ({"hidden_size": 8.0}, "hidden_size is 8.0"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps is 1e-320.*float32"),
        ({"rope_theta": 10**400}, "rope_theta is 10000.*float32"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"qk_norm": 1}, "qk_norm is 1; it is a flag"),
        ({"vocab_size": 10**14}, "vocab_size is 100000000000000; .* to 2,147,483,647"),
        ({"layer_windows": (4,)}, "layer_windows has 1 entries for 2 layers"),
        ({"layer_windows": (4, -1)}, r"layer_windows is \(4, -1\); give a tuple of integers from 0"),
        ({"layer_windows": [4, 4]}, r"layer_windows is \[4, 4\]; give a tuple"),
        ({"nope_layers": (1, 0)}, r"nope_layers is \(1, 0\); .* from 0 to 1, each above"),
        ({"nope_layers": (2,)}, r"nope_layers is \(2,\); .* from 0 to 1"),
        ({"num_token_ids": 30}, "num_token_ids is 30; .* from 1 to vocab_size, 29"),
        ({"num_token_ids": 20, "unused_ids": (20,)}, r"unused_ids is \(20,\); .* from 0 to 19"),
        ({"num_token_ids": 2, "unused_ids": (0, 1)}, "unused_ids names all 2 ids"),
        ({"rope": {"kind": "linear"}}, "rope is .*; give a RopeScaling"),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused(change, found):
    with pytest.raises(ModelConfigError, match=found):
        replace(LLAMA, **change)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"kind": "longrope"}, "kind is 'longrope'; the kinds are default, linear"),
        ({"kind": "linear", "factor": 0.5}, "factor is 0.5; for linear it must be a finite number of at least 1"),
        ({"kind": "linear", "factor": math.inf}, "factor is inf"),
        ({"kind": "linear", "factor": 2.0, "beta_fast": 9.0}, "beta_fast is 9.0, but linear does not use it"),
        ({"kind": "dynamic", "factor": 2.0}, "original_max_positions is 0; for dynamic"),
        ({"kind": "yarn", "factor": 2.0, "original_max_positions": 4, "truncate": 1}, "truncate is 1"),
        ({"bogus": 1}, r"unknown fields \['bogus'\]"),
        (3, "has 3 in its place"),
    ],
)
def test_rope_scaling_that_cannot_be_applied_is_refused(fields, found):
    with pytest.raises(ModelConfigError, match=found):
        ModelConfig.from_fields(LLAMA.to_fields() | {"rope": fields})


def test_config_survives_a_message():
    config = FAMILIES["every_option"]
    assert ModelConfig.from_fields(config.to_fields()) == config
    with pytest.raises(ModelConfigError, match="bogus"):
        ModelConfig.from_fields(config.to_fields() | {"bogus": 1})
    with pytest.raises(ModelConfigError, match="vocab_size"):
        ModelConfig.from_fields({name: value for name, value in config.to_fields().items() if name != "vocab_size"})


def test_config_and_packing_load_no_torch():
    code = "import sys, workers.model_config, workers.learning.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
