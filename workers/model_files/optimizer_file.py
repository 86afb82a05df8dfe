"""The optimizer's state as a safetensors file, float32: flat, in the order of the flat weights (`shm/layout.py`)."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import CheckpointError
from workers.model_files.flat_weights import Written, mapped_tensors, write_tensors
from workers.model_files.safetensors_header import read_header


def save_optimizer(path: Path | str, state: Mapping[str, Tensor], beat: Callable[[], None] = lambda: None) -> Written:
    """Write what `Adam.state` gives. See `write_tensors`."""
    return write_tensors(path, state, torch.float32, beat)


def load_optimizer(path: Path | str, state: Mapping[str, Tensor], beat: Callable[[], None] = lambda: None) -> None:
    """Fill the tensors of `state` from the file that `save_optimizer` wrote. Raises CheckpointError unless it holds
    exactly these; beat is called before each one: a sign of life.
    """
    infos = read_header(Path(path))
    found = {name: (info.dtype, info.shape) for name, info in infos.items()}
    wanted = {name: ("F32", tuple(tensor.shape)) for name, tensor in state.items()}
    if found != wanted:
        raise CheckpointError(
            f"{path} holds {_listed(found)}, but this model's optimizer has {_listed(wanted)}; give the checkpoint of "
            "a run of the same model."
        )
    for name, tensor in mapped_tensors(infos):
        beat()
        state[name].copy_(tensor)


def _listed(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} ({dtype} {list(shape)})" for name, (dtype, shape) in sorted(tensors.items()))[:500]
