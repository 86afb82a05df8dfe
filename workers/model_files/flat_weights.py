"""Weights from a model directory into a flat buffer, and from a flat buffer into a safetensors file.

Neither way does a second whole copy exist: a tensor is read from the mapped file straight into its place, and written
from there in pieces.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.errors import CheckpointError
from workers.machine.disk_space import no_space, require_space
from workers.machine.limits import refusal_in_words, require_threads
from workers.model_config import ModelConfig, layout
from workers.model_files.checksum import Checksum
from workers.model_files.safetensors_header import DTYPE_NAMES, TensorInfo
from workers.model_files.tensor_files import check_tensors
from workers.model_files.tensor_names import hf_places

PIECE_BYTES = 1 << 26  # written at once: what is converted, or copied from a GPU, at a time
SYNC_BYTES = 1 << 30  # written between two syncs, so that the last one is no long silence
DTYPE_CODES = {getattr(torch, name): code for code, name in DTYPE_NAMES.items()}


class Written(NamedTuple):
    """What a file holds now; see `checksum.py`."""

    num_bytes: int
    checksum: int


def load_flat(
    directory: Path | str,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    beat: Callable[[], None] = lambda: None,
) -> Tensor:
    """The weights of a model directory, float32 [num_elements] by `layout(config)`, whatever dtype the files have.

    beat is called before each tensor: a sign of life. Raises CheckpointError unless the files hold exactly this model.
    """
    infos = check_tensors(directory, config)
    places = hf_places(config)
    flat = torch.empty(layout(config).num_elements, dtype=torch.float32, device=device)
    for name, tensor in mapped_tensors(infos):
        beat()
        place = places[name]
        flat.narrow(0, place.offset, place.num_elements).view(place.shape).copy_(tensor)
    return flat


def mapped_tensors(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all `infos`, file by file. A tensor is a view of its mapped file: only what is read of it takes
    memory, and that the kernel can take back.
    """
    for file in dict.fromkeys(info.file for info in infos.values()):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in (name for name, info in infos.items() if info.file == file):
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} can't be read ({error}); copy or download it again.") from error


def hf_tensors(flat: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's tensors as views of `flat`; a tied head is left out, as transformers leaves it."""
    return {
        name: flat.narrow(0, place.offset, place.num_elements).view(place.shape)
        for name, place in hf_places(config).items()
    }


def save_weights(
    path: Path | str,
    flat: Tensor,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    beat: Callable[[], None] = lambda: None,
) -> Written:
    """Write the weights as one safetensors file of `dtype`. See `write_tensors`."""
    return write_tensors(path, hf_tensors(flat.detach(), config), dtype, beat)


def write_tensors(
    path: Path | str, tensors: Mapping[str, Tensor], dtype: torch.dtype, beat: Callable[[], None] = lambda: None
) -> Written:
    """One safetensors file, as transformers writes it: all of it, synced, or nothing.

    tensors: contiguous, on any device, views of one storage too (safetensors' own writer refuses those). beat is called
    before each piece. A thread beside makes the checksum of a piece while it is written. Raises CheckpointError when
    the disk is too small, or writing fails.
    """
    path = Path(path)
    header = _header(tensors, dtype)
    num_bytes = len(header) + sum(tensor.numel() * dtype.itemsize for tensor in tensors.values())
    require_space(path.parent, num_bytes)
    temporary = path.with_name(f"{_unfinished(path)}{os.getpid()}")
    checksum = Checksum()
    try:
        require_threads(1)
        with open(temporary, "wb") as file, ThreadPoolExecutor(1, "checksum") as beside:
            checksum.add(header)
            file.write(header)
            unsynced = 0
            for piece in _pieces(tensors, dtype):
                beat()
                added = beside.submit(checksum.add, piece)
                file.write(piece)
                added.result()
                unsynced += len(piece)
                if unsynced >= SYNC_BYTES:
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsynced = 0
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(path.parent, num_bytes) from error
        if error.errno == errno.EAGAIN:
            raise CheckpointError(f"{path} can't be written: {refusal_in_words(error)}") from error
        raise CheckpointError(f"{path} can't be written: {error.strerror}; see to that place.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Written(num_bytes, checksum.value)


def remove_unfinished(path: Path | str) -> None:
    """Of a writer of `path` that was killed at it; no other may be at work there. Raises CheckpointError."""
    path = Path(path)
    try:
        for left in [file for file in path.parent.iterdir() if file.name.startswith(_unfinished(path))]:
            left.unlink()
    except OSError as error:
        raise CheckpointError(f"{path.parent} can't be written to: {error.strerror}; see to that place.") from error


def _unfinished(path: Path) -> str:
    """How the name begins of a file that is to become `path`."""
    return f".{path.name}.tmp-"


def _header(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bytes:
    """The header with its length before it, padded so that the data begins at a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * dtype.itemsize
        entries[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[memoryview]:
    """The tensors' data in `dtype`, little-endian as every machine we run on."""
    for tensor in tensors.values():
        for part in tensor.reshape(-1).split(PIECE_BYTES // dtype.itemsize):
            yield memoryview(part.to(device="cpu", dtype=dtype).view(torch.uint8).numpy())
