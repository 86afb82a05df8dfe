"""Weights between model directories and the flat buffer: values, dtypes, memory, and what a failed write leaves."""

import errno
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from bench.small_models import SMALL, write_small_model
from workers.errors import CheckpointError
from workers.model import bind_weights, init_flat
from workers.model_config import ModelConfig
from workers.model_files import flat_weights
from workers.model_files.checksum import file_checksum
from workers.model_files.flat_weights import load_flat, save_weights
from workers.model_files.tensor_files import SINGLE

CONFIG = replace(SMALL, qkv_bias=True, tie_embeddings=False)


def write(directory, **options):
    return write_small_model(directory, family="qwen2", tie=False, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 4])
def test_each_row_is_where_the_model_reads_it(tmp_path, dtype, shards):
    directory = write(tmp_path / "model", dtype=dtype, shards=shards)
    weights = bind_weights(load_flat(directory, CONFIG), CONFIG)
    files = {}
    for file in directory.glob("*.safetensors"):
        files |= load_file(file)
    stacked = {
        "embed": ["model.embed_tokens.weight"],
        "head": ["lm_head.weight"],
        "final_norm": ["model.norm.weight"],
        "layers.1.qkv": [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"],
        "layers.1.qkv_bias": [f"model.layers.1.self_attn.{x}_proj.bias" for x in "qkv"],
        "layers.0.out": ["model.layers.0.self_attn.o_proj.weight"],
        "layers.0.gate_up": ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"],
        "layers.1.down": ["model.layers.1.mlp.down_proj.weight"],
        "layers.1.attention_norm": ["model.layers.1.input_layernorm.weight"],
        "layers.0.mlp_norm": ["model.layers.0.post_attention_layernorm.weight"],
    }
    for ours, theirs in stacked.items():
        assert torch.equal(weights.named[ours], torch.cat([files[name].float() for name in theirs])), ours
    assert weights.named["embed"].dtype == torch.float32


def test_a_tied_head_and_its_embedding_are_one_storage(tmp_path):
    config = ModelConfig.from_fields(CONFIG.to_fields() | {"tie_embeddings": True})
    weights = bind_weights(load_flat(write_small_model(tmp_path / "m", family="qwen2"), config), config)
    assert weights.head.data_ptr() == weights.embed.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tie", [True, False])
def test_what_is_saved_is_loaded_again(tmp_path, dtype, tie):
    config = ModelConfig.from_fields(CONFIG.to_fields() | {"tie_embeddings": tie})
    flat = init_flat(config, seed=1)
    written = save_weights(tmp_path / SINGLE, flat, config, dtype)
    assert written == ((tmp_path / SINGLE).stat().st_size, file_checksum(tmp_path / SINGLE))
    assert torch.equal(load_flat(tmp_path, config), flat.to(dtype).float())
    assert int.from_bytes((tmp_path / SINGLE).read_bytes()[:8], "little") % 8 == 0  # so that the data is aligned
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert ("lm_head.weight" in file.keys()) is not tie  # it is no dict
        assert file.get_tensor("model.norm.weight").dtype == dtype
    assert os.listdir(tmp_path) == [SINGLE]


def test_pieces_of_a_tensor_make_it_whole(tmp_path, monkeypatch):
    flat = init_flat(CONFIG, seed=1)
    monkeypatch.setattr(flat_weights, "PIECE_BYTES", 1000)
    monkeypatch.setattr(flat_weights, "SYNC_BYTES", 5000)
    beats = []
    save_weights(tmp_path / SINGLE, flat, CONFIG, torch.bfloat16, beat=lambda: beats.append(1))
    assert torch.equal(load_flat(tmp_path, CONFIG), flat.bfloat16().float())
    assert len(beats) > flat.numel() * 2 / 1000


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"has 1,000 bytes free, and [\d,]+ are to be written"):
        save_weights(tmp_path / SINGLE, init_flat(CONFIG, seed=1), CONFIG)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile_leaves_the_file_before_it(tmp_path, monkeypatch):
    flat = init_flat(CONFIG, seed=1)
    save_weights(tmp_path / SINGLE, flat, CONFIG)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="bytes free"):
        save_weights(tmp_path / SINGLE, init_flat(CONFIG, seed=2), CONFIG)
    monkeypatch.undo()
    assert torch.equal(load_flat(tmp_path, CONFIG), flat)
    assert os.listdir(tmp_path) == [SINGLE]


def test_a_directory_that_is_not_there_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="can't be written"):
        save_weights(tmp_path / "absent" / SINGLE, init_flat(CONFIG, seed=1), CONFIG)
