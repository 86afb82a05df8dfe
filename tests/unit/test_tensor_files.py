"""Which model directories are refused before anything is loaded, and what is said of them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.small_models import SMALL, write_small_model, write_tensors
from workers.errors import CheckpointError
from workers.model_config import ModelConfig, layout
from workers.model_files.tensor_files import INDEX, SINGLE, check_tensors, find_tensors
from workers.model_files.tensor_names import hf_places

CASES = Path(__file__).parent.parent / "data" / "cases"
NORM = "model.layers.1.input_layernorm.weight"
CONFIG = replace(SMALL, qk_norm=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "whole", family="qwen3")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "sharded", family="qwen3", shards=3)


@pytest.fixture
def copy(tmp_path):
    """copy(directory): a copy that a test may break."""
    return lambda directory: Path(shutil.copytree(directory, tmp_path / "model"))


def change(directory, *, remove=(), **added):
    """Rewrite model.safetensors without the tensors `remove`, and with others."""
    tensors = load_file(directory / SINGLE)
    for name in remove:
        del tensors[name]
    write_tensors(directory, tensors | added)


def change_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_map_of(directory):
    return json.loads((directory / INDEX).read_text())["weight_map"]


def refusal(directory, config=CONFIG):
    with pytest.raises(CheckpointError) as error:
        check_tensors(directory, config)
    return str(error.value)


@pytest.mark.parametrize("directory", ["whole", "sharded"])
def test_a_whole_checkpoint_gives_each_tensor_with_its_file(directory, request):
    directory = request.getfixturevalue(directory)
    infos = check_tensors(directory, CONFIG)
    assert list(infos) == list(hf_places(CONFIG))
    assert {name: info.shape for name, info in infos.items()} == {
        name: place.shape for name, place in hf_places(CONFIG).items()
    }
    for name, info in infos.items():
        assert torch.equal(
            torch.frombuffer(bytearray(info.file.read_bytes()[info.start :][: info.num_bytes]), dtype=torch.float32),
            load_file(info.file)[name].reshape(-1),
        )


def test_places_are_end_to_end_and_cover_the_buffer_once():
    end = 0
    for place in hf_places(CONFIG).values():
        assert place.offset == end
        end += place.num_elements
    assert end == layout(CONFIG).num_elements


# --- missing, unexpected, mis-shaped ---------------------------------------------------------------------------------


def test_missing_and_unexpected_tensors_are_named_together(whole, copy):
    directory = copy(whole)
    change(directory, remove=[NORM, "model.norm.weight"], **{"model.layers.0.mlp.gate.weight": torch.ones(3)})
    said = refusal(directory)
    assert f"missing {NORM}, model.norm.weight;" in said
    assert "unexpected model.layers.0.mlp.gate.weight." in said
    assert "Nothing is filled in" in said


def test_a_tensor_of_another_shape_is_named_with_both_shapes(whole, copy):
    directory = copy(whole)
    change(directory, **{"model.norm.weight": torch.ones(63), "model.embed_tokens.weight": torch.ones(300, 64)})
    said = refusal(directory)
    assert "model.norm.weight [63] where the model has [64]" in said
    assert "model.embed_tokens.weight [300, 64] where the model has [312, 64]" in said


def test_a_tensor_of_another_dtype_is_named(whole, copy):
    directory = copy(whole)
    change(directory, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    assert "isn't float32, bfloat16 or float16 model.norm.weight (I8)" in refusal(directory)


def test_a_long_list_ends_with_a_count(whole, copy):
    directory = copy(whole)
    change(directory, remove=[name for name in load_file(directory / SINGLE) if "layers" in name])
    said = refusal(directory)
    assert "layers.0.self_attn.q_proj.weight" in said
    assert "and 2 more" in said  # of 22


def test_rotary_frequencies_of_old_checkpoints_are_let_through(whole, copy):
    directory = copy(whole)
    change(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in check_tensors(directory, CONFIG)


def test_a_model_of_other_biases_is_refused_by_name(whole):
    config = ModelConfig.from_fields(CONFIG.to_fields() | {"qkv_bias": True, "qk_norm": False})
    said = refusal(whole, config)
    assert "missing model.layers.0.self_attn.q_proj.bias" in said
    assert "unexpected model.layers.0.self_attn.k_norm.weight" in said


# --- HR21: what the files lack ---------------------------------------------------------------------------------------


def test_a_shard_that_is_not_there_is_named_with_its_tensors(sharded, copy):
    """HR21: the index names two shards, and one lies beside it."""
    directory = copy(sharded)
    shutil.copy(CASES / "HR21" / INDEX, directory / INDEX)
    (directory / "model-00001-of-00003.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    said = refusal(directory)
    assert "lacks the files model-00002-of-00002.safetensors" in said
    assert "model.norm.weight, model.layers.0.self_attn.q_norm.weight" in said


def test_a_checkpoint_without_a_norm_is_refused(whole, copy):
    """HR21."""
    directory = copy(whole)
    change(directory, remove=[NORM])
    assert f"missing {NORM}." in refusal(directory)


def test_an_unknown_tensor_is_refused(whole, copy):
    """HR21."""
    directory = copy(whole)
    change(directory, extra=torch.zeros(1))
    assert "unexpected extra." in refusal(directory)


@pytest.mark.parametrize("kept", [7, 200, -1])
def test_a_file_cut_short_is_told(whole, copy, kept):
    directory = copy(whole)
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[:kept])
    said = refusal(directory)
    assert str(directory / SINGLE) in said
    assert f"{len(data[:kept]):,}" in said


def test_a_shard_cut_short_is_named(sharded, copy):
    directory = copy(sharded)
    shard = directory / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    said = refusal(directory)
    assert f"{shard} is cut short" in said


# --- headers and indices that are none -------------------------------------------------------------------------------


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "0 bytes"),
        ((1 << 62).to_bytes(8, "little") + b"{}", f"a header of {1 << 62:,}"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n", "run `git lfs pull`"),
        (header(b"{"), "no JSON"),
        (header(b"[" * 100_000), "no JSON"),
        (header(b"[]"), "no JSON object"),
        (header(b'{"a": 1}'), "entry of tensor a is 1"),
        (header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', bytes(8)), "tensors end at byte"),
        (header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', bytes(4)), "4 bytes of data"),
        (header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', bytes(8)), "is due"),
        (header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', bytes(4)), "entry of tensor a"),
        (
            header(b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": 1}', bytes(4)),
            "names a twice",
        ),
    ],
)
def test_a_broken_header_is_told(tmp_path, file, why):
    (tmp_path / SINGLE).write_bytes(file)
    with pytest.raises(CheckpointError) as error:
        find_tensors(tmp_path)
    assert str(tmp_path / SINGLE) in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"a": 1, "a": 2}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="index.json"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "a.bin", 1])
def test_an_index_reads_no_file_from_elsewhere(sharded, copy, file):
    directory = copy(sharded)
    change_index(directory, weight_map_of(directory) | {NORM: file})
    with pytest.raises(CheckpointError, match="a shard is a .safetensors file beside the index") as error:
        find_tensors(directory)
    assert NORM in str(error.value)


def test_an_index_that_places_a_tensor_in_the_wrong_shard_is_refused(sharded, copy):
    directory = copy(sharded)
    weight_map = weight_map_of(directory)
    right = weight_map[NORM]
    wrong = next(file for file in weight_map.values() if file != right)
    change_index(directory, weight_map | {NORM: wrong})
    said = refusal(directory)
    assert f"{NORM} (not in {wrong})" in said
    assert f"{NORM} (in {right})" in said


def test_a_tensor_that_the_index_does_not_name_is_refused(sharded, copy):
    directory = copy(sharded)
    weight_map = weight_map_of(directory)
    file = weight_map.pop(NORM)
    change_index(directory, weight_map)
    assert f"doesn't name {NORM} (in {file})" in refusal(directory)


def test_a_single_file_beside_an_index_is_ambiguous(whole, sharded, copy):
    directory = copy(sharded)
    shutil.copy(whole / SINGLE, directory / SINGLE)
    assert "holds both" in refusal(directory)


# --- directories without safetensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "holds no weights"),
        (["pytorch_model.bin", "training_args.bin"], "only as pytorch_model.bin, and"),
        (["model-q4.gguf"], "gguf_file='model-q4.gguf'"),
        (["model-00001-of-00002.safetensors"], "neither model.safetensors nor"),
        (["adapter_model.safetensors"], "an adapter"),
    ],
)
def test_what_is_there_instead_of_safetensors_is_told(tmp_path, files, said):
    for file in files:
        (tmp_path / file).write_bytes(b"")
    assert said in refusal(tmp_path)


def test_a_file_is_no_model_directory(tmp_path):
    (tmp_path / "model").write_bytes(b"")
    assert "is no directory" in refusal(tmp_path / "model")
    assert "is no directory" in refusal(tmp_path / "absent")
