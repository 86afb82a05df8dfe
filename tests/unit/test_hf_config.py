"""What a config.json says, in both spellings, and what is refused in it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from workers.errors import ModelConfigError
from workers.model_config import TINY, ModelConfig
from workers.model_files.config import DEFAULTS, parse_model_config, read_model_config, to_hf_config
from workers.rope_scaling import RopeScaling

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(model_type="llama", **changes):
    return parse_model_config(SMALL | {"model_type": model_type} | changes, "DIR/config.json")


@pytest.mark.parametrize("model_type", DEFAULTS)
@pytest.mark.parametrize("drop", ["nothing", "defaults"])
def test_a_missing_key_means_what_transformers_takes_it_to_mean(model_type, drop):
    transformers = pytest.importorskip("transformers", reason="transformers (extra `hf`) is not installed")
    written = json.loads(transformers.AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    assert parse_model_config({"model_type": model_type}) == parse_model_config(written)
    if drop == "defaults":  # each key alone
        for name in DEFAULTS[model_type]:
            without = {key: value for key, value in written.items() if key != name}
            assert parse_model_config(without) == parse_model_config(written), name


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_families_differ_in_biases_norms_and_heads(model_type):
    config = parse(model_type)
    assert config.qkv_bias == (model_type == "qwen2")
    assert config.qk_norm == (model_type == "qwen3")
    assert config.tie_embeddings == (model_type == "smollm3")
    assert config.head_dim == (128 if model_type == "qwen3" else 8)
    assert config.nope_layers == ((3,) if model_type == "smollm3" else ())
    assert (config.num_kv_heads, config.num_layers, config.vocab_size) == (2, 4, 40)
    assert config.rms_norm_eps == 1e-6


def test_biases_are_read_where_the_model_type_has_them():
    biased = {"attention_bias": True, "mlp_bias": True}
    for model_type, attention, mlp in (("llama", True, True), ("smollm3", True, True), ("qwen3", True, False)):
        config = parse(model_type, **biased)
        assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (attention, attention, mlp)
    for model_type in ("mistral", "qwen2"):
        config = parse(model_type, **biased)
        assert (config.out_bias, config.mlp_bias) == (False, False)


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": 7}, (7,) * 4),
        ("mistral", {"sliding_window": None}, ()),
        ("llama", {"sliding_window": None}, ()),
        ("llama", {"sliding_window": 256}, ()),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 2}, ()),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 2, "use_sliding_window": True}, (0, 0, 7, 7)),
        ("qwen2", {"sliding_window": 7, "max_window_layers": 0, "use_sliding_window": True}, (7,) * 4),
        ("qwen2", {"use_sliding_window": True}, ()),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 30}, (0,) * 28 + (4096,) * 2),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (5, 0, 5, 0),
        ),
        ("smollm3", {"sliding_window": 7}, ()),
        ("smollm3", {"sliding_window": 7, "use_sliding_window": True}, (0, 0, 0, 7)),
        ("smollm3", {"sliding_window": 7, "use_sliding_window": True, "no_rope_layers": [0, 1, 1, 1, 0]}, (7, 0, 0, 0)),
    ],
)
def test_each_model_type_has_its_own_rule_for_windows(model_type, changes, windows):
    assert parse(model_type, **changes).layer_windows == windows


def test_smollm3_says_which_layers_rotate():
    assert parse("smollm3", no_rope_layer_interval=2).nope_layers == (1, 3)
    assert parse("smollm3", no_rope_layers=[1, 0, 1, 1, 0]).nope_layers == (1,)
    assert parse("smollm3", no_rope_layers=[1, 1, 1, 1]).nope_layers == ()


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 2}, RopeScaling(kind="linear", factor=2.0)),
        ({"type": "linear", "factor": 2.5}, RopeScaling(kind="linear", factor=2.5)),
        ({"rope_type": "default"}, RopeScaling()),
        (
            {"rope_type": "dynamic", "factor": 2.0},
            RopeScaling(kind="dynamic", factor=2.0, original_max_positions=256),
        ),
        (
            LLAMA3,
            RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
            ),
        ),
        (
            YARN | {"truncate": False, "beta_fast": 16, "attention_factor": 1.5},
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max_positions=64,
                beta_fast=16.0,
                attention_factor=1.5,
                truncate=False,
            ),
        ),
        (
            {"type": "yarn", "factor": None, "original_max_position_embeddings": 128, "attention_factor": 1.0},
            RopeScaling(kind="yarn", factor=2.0, original_max_positions=128),
        ),
    ],
)
def test_both_spellings_of_rope_scaling_say_the_same(scaling, expected):
    old = parse(rope_theta=5000, rope_scaling=scaling)
    new = parse(rope_parameters=scaling | {"rope_theta": 5000})
    both = parse(rope_scaling=scaling | {"rope_theta": 5000}, rope_parameters=scaling | {"rope_theta": 5000})
    assert old == new == both
    assert old.rope == expected
    assert old.rope_theta == 5000.0


def test_yarn_without_an_attention_factor_takes_the_papers_or_deepseeks():
    plain = parse(rope_scaling=YARN).rope.attention_factor
    assert plain == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    ratio = parse(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}).rope.attention_factor
    assert ratio == pytest.approx(1.1386294 / 1.0693147)
    assert parse(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0}).rope.attention_factor == plain


def test_of_two_statements_about_a_scaling_the_one_counts_that_transformers_reads():
    inner = YARN | {"original_max_position_embeddings": 32}
    assert parse(rope_scaling=inner, original_max_position_embeddings=64) == parse(rope_scaling=YARN)
    assert parse(rope_scaling=YARN | {"type": "linear"}) == parse(rope_scaling=YARN)
    assert parse(rope_scaling=YARN | {"beta_fast": 0, "beta_slow": 0}) == parse(rope_scaling=YARN)


def test_yarn_reaches_as_far_as_its_factor_says_and_no_other_kind_does():
    assert parse(rope_scaling=YARN | {"factor": 8.0}).max_positions == 512
    assert parse(rope_scaling=YARN | {"factor": 2.0}).max_positions == 256
    assert parse(rope_scaling={"type": "linear", "factor": 8.0}).max_positions == 256
    assert parse(rope_scaling=LLAMA3).max_positions == 256


def test_dynamic_scaling_ends_the_context_where_it_would_begin_to_change_it():
    config = parse(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert config.max_positions == 256
    assert replace(config, max_positions=64).rope == config.rope
    with pytest.raises(ModelConfigError, match=r"max_positions is 257, but dynamic.*from 256 positions on"):
        replace(config, max_positions=257)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'.*supported are llama, mistral"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["llama"]}, "model_type is .'llama'."),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq.*unquantised"),
        ({"quantization": {"bits": 4}}, "quantization is .*unquantised"),
        ({"num_local_experts": 8}, "num_local_experts is 8; .*dense"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"n_routed_experts": 8}, "n_routed_experts is 8"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config is "),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported is rotating whole heads"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters: partial_rotary_factor is 0.25"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "rope_scaling: type is 'longrope'; supported are default",
        ),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type is 3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is None; give a finite number of at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}},
            r"'mrope_section' is \[1\]; known keys",
        ),
        ({"rope_scaling": {"type": "linear", "a\n" * 99: 1}}, r"rope_scaling: 'a.na.n"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; give an object"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "rope_scaling: .*high_freq_factor is 1.0 and low_freq"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1; give true or false"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast is 1.0 and beta_slow 2.0"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0; yarn needs one above 1"),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_scaling is .*rope_parameters says something else"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*finite number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"vocab_size": "40"}, "vocab_size is '40'; give an integer"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; give an integer from 1 to 10,000"),
        ({"hidden_size": 10**30}, "hidden_size is 1000.*2,147,483,647"),
        ({"hidden_size": 30}, "hidden_size is 30 and num_attention_heads 4, which does not divide it; write head_dim"),
        ({"num_key_value_heads": 3}, "config.json: ModelConfig has 4 query heads and 3 key/value heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; give true or false"),
        ({"sliding_window": 7}, "sliding_window is 7; models of type llama have none"),
        ({"layer_types": ["sliding_attention"] * 4}, "layers of type llama are all alike, here full_attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types is .* each of the 4 layers"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 4}, "layer_types is .*chunked"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "needs use_sliding_window true"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers is .*each of the 4 layers"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim is None"),
    ],
)
def test_what_this_decoder_does_not_compute_is_refused_by_file_and_key(changes, found):
    with pytest.raises(ModelConfigError, match=found) as caught:
        parse(**changes)
    assert str(caught.value).startswith("DIR/config.json: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON .*utf-8"),
        (b"[" * 100_000, "is not JSON .it is nested too deeply"),
        (b"[1, 2]", r"holds \[1, 2\]; a model configuration is a JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * (5 << 20), "has more than 4 MiB"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_sentence(tmp_path, content, found):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=found) as caught:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config.json can't be read \(No such file"):
        read_model_config(tmp_path)
    with pytest.raises(ModelConfigError, match=r"can't be read \(embedded null byte"):
        read_model_config(str(tmp_path) + "\0")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelConfigError, match=r"can't be read \(Is a directory"):
        read_model_config(tmp_path)


WRITABLE = {
    "tiny": TINY,
    "bias": replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True),
    "llama3": replace(TINY, rope=parse(rope_scaling=LLAMA3).rope),
    "yarn": replace(TINY, rope=parse(rope_scaling=YARN | {"truncate": False}).rope),
    "yarn_cut": replace(TINY, rope=parse(rope_scaling=YARN).rope, max_positions=100),
    "linear": replace(TINY, rope=RopeScaling(kind="linear", factor=3.0), rope_theta=5e5),
    "dynamic": replace(TINY, rope=RopeScaling(kind="dynamic", factor=3.0, original_max_positions=1024)),
    "qwen2": replace(TINY, qkv_bias=True, layer_windows=(0, 9)),
    "qwen3": replace(TINY, qk_norm=True, tie_embeddings=False, head_dim=24),
    "mistral": replace(TINY, layer_windows=(9, 9)),
    "smollm3": replace(TINY, nope_layers=(1,), layer_windows=(9, 0)),
}


@pytest.mark.parametrize("config", WRITABLE.values(), ids=WRITABLE)
def test_a_model_of_ours_is_written_so_that_it_reads_back(config):
    written = to_hf_config(replace(config, num_token_ids=100, unused_ids=(3,)))
    read = parse_model_config(json.loads(json.dumps(written)))
    assert read.max_positions >= config.max_positions
    assert replace(read, max_positions=config.max_positions) == config


def test_a_model_that_no_family_has_is_not_written():
    with pytest.raises(ModelConfigError, match=r"No model type of Hugging Face .*llama, qwen2"):
        to_hf_config(replace(TINY, qk_norm=True, nope_layers=(0,)))


def test_reading_a_configuration_loads_no_torch():
    code = "import sys, workers.model_files.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_new_field_survives_a_message():
    config = replace(
        TINY,
        rope=parse(rope_scaling=YARN).rope,
        layer_windows=(0, 9),
        nope_layers=(1,),
        num_token_ids=250,
        unused_ids=(2, 5),
    )
    assert ModelConfig.from_fields(json.loads(json.dumps(config.to_fields()))) == config  # lists for tuples
