"""The optimizer's state comes back from its file bit for bit, and nothing else is taken for it."""

import pytest
import torch

from workers.errors import CheckpointError
from workers.learning.adam import Adam
from workers.model_files.checksum import file_checksum
from workers.model_files.flat_weights import remove_unfinished, write_tensors
from workers.model_files.optimizer_file import load_optimizer, save_optimizer


def adam(num_elements=100, num_steps=0):
    torch.manual_seed(num_steps)
    weights, gradients = torch.zeros(num_elements), torch.zeros(num_elements)
    made = Adam(weights, gradients, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, num_decayed=60)
    for _ in range(num_steps):
        gradients.copy_(torch.randn(num_elements))
        made.step(lr=0.1)
    return made


def test_state_comes_back_bit_for_bit(tmp_path):
    saved, beats = adam(num_steps=3), []
    written = save_optimizer(tmp_path / "optimizer.safetensors", saved.state())
    assert written == ((path := tmp_path / "optimizer.safetensors").stat().st_size, file_checksum(path))
    loaded = adam()
    load_optimizer(tmp_path / "optimizer.safetensors", loaded.state(), beat=lambda: beats.append(1))
    assert beats
    for name, tensor in saved.state().items():
        assert torch.equal(tensor, loaded.state()[name]) and tensor.abs().sum() > 0


def test_state_of_another_model_is_refused_with_both_sizes(tmp_path):
    save_optimizer(tmp_path / "o.safetensors", adam(99).state())
    with pytest.raises(CheckpointError, match=r"mean \(F32 \[99\]\).* but .* mean \(F32 \[100\]\)"):
        load_optimizer(tmp_path / "o.safetensors", adam().state())


def test_state_of_another_dtype_or_with_a_part_missing_is_refused(tmp_path):
    write_tensors(tmp_path / "o.safetensors", adam().state(), torch.bfloat16)
    with pytest.raises(CheckpointError, match="BF16"):
        load_optimizer(tmp_path / "o.safetensors", adam().state())
    write_tensors(tmp_path / "o.safetensors", {"mean": torch.zeros(100)}, torch.float32)
    with pytest.raises(CheckpointError, match=r"num_steps \(F32 \[\]\)"):
        load_optimizer(tmp_path / "o.safetensors", adam().state())


def test_what_a_killed_writer_has_left_is_removed_and_nothing_else(tmp_path):
    for name in (".o.safetensors.tmp-17", ".o.safetensors.tmp-18", "o.safetensors", ".other.tmp-17"):
        (tmp_path / name).write_bytes(b"")
    remove_unfinished(tmp_path / "o.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".other.tmp-17", "o.safetensors"]
    with pytest.raises(CheckpointError, match="absent"):
        remove_unfinished(tmp_path / "absent" / "o.safetensors")
