"""In a process of its own: the bytes that a micro-batch adds at its peak to what a trainee takes anyway, on stdout.

One line for each (config, number of rows, length) of the argument, in a fork of its own: what one leaves in the
allocator would hide the peak of the next, and to load torch again takes longer than to measure.
"""

import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from workers.learning.packing import TrainingRows
from workers.learning.training import Trainee
from workers.model import init_flat
from workers.model_config import TINY, ModelConfig


def peak_bytes() -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def make_rows(num_rows: int, length: int, vocab_size: int) -> TrainingRows:
    """Every token but the first is generated."""
    rng = np.random.default_rng(0)
    versions = np.zeros((num_rows, length), dtype=np.int32)
    versions[:, -1] = -1
    weights = (versions >= 0).astype(np.float32).ravel()
    return TrainingRows(
        lengths=np.full(num_rows, length, dtype=np.int32),
        tokens=rng.integers(0, vocab_size, num_rows * length, dtype=np.int32),
        weights=weights,
        scales=weights,
        behaviour_logprobs=-weights,
        versions=versions.ravel(),
    )


def measure(config: ModelConfig, num_rows: int, length: int) -> int:
    initial = init_flat(config, seed=0)
    trainee = Trainee(config, initial, optimizer={}, loss={"name": "PolicyGradient"}, micro_batch_tokens=10**6)
    trainee.forward_backward(make_rows(1, 2, config.vocab_size), version=0, zero_gradients=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    trainee.forward_backward(make_rows(num_rows, length, config.vocab_size), version=0, zero_gradients=True)
    return peak_bytes() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    for fields, *size in eval(sys.argv[1]):
        if os.fork() == 0:
            print(measure(ModelConfig.from_fields(TINY.to_fields() | fields), *size), flush=True)
            os._exit(0)
        if os.wait()[1] != 0:
            sys.exit(f"a measurement failed: {fields}")
