"""The logits of our own decoder for the weights of a model directory, to hold beside transformers'."""

from pathlib import Path

import torch
from torch import Tensor

from workers.learning.packed_attention import PackedAttention, Packing
from workers.model import RopeTable, bind_weights, decode, logits
from workers.model_files.config import read_model_config
from workers.model_files.flat_weights import load_flat


@torch.inference_mode()
def our_logits(directory: Path, tokens: Tensor) -> Tensor:
    """tokens [T] int64 -> [T, V] float32, in one pass."""
    config = read_model_config(directory)
    weights = bind_weights(load_flat(directory, config), config)
    positions = torch.arange(len(tokens))
    attend = PackedAttention(Packing((1, len(tokens)), positions, positions), config.layer_windows)
    return logits(weights, decode(weights, config, RopeTable(config), tokens, positions, attend))
