"""The header of a safetensors file, checked against the file itself, without reading any tensor. A leaf: no torch.

A file is 8 bytes (little-endian length of the header), the header (JSON: tensor name -> dtype, shape, begin and end
within the data), then the data. The safetensors library checks the same when it reads; here the answer comes before
any process starts, names file and tensor, and tells a short file from a wrong one.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from workers.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
LFS_POINTER = b"version https://git-lfs"  # how the file begins that a clone without Git LFS has in its place
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # what Headway reads
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `num_bytes` of data from byte `start` of the file on."""

    file: Path
    dtype: str  # as safetensors names it: F32, BF16, F16 or one that can't be loaded
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the file. Raises CheckpointError unless header and file fit together."""
    try:
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            first = file.read(8)
            if first + file.read(len(LFS_POINTER) - 8) == LFS_POINTER:
                raise CheckpointError(
                    f"{path} is no weights yet, but Git LFS's pointer to them; run `git lfs pull` in its directory."
                )
            file.seek(8)
            header_bytes = int.from_bytes(first, "little")
            if file_bytes < 8 or header_bytes > MAX_HEADER_BYTES:
                raise _broken(path, f"it has {file_bytes:,} bytes and names a header of {header_bytes:,}")
            if 8 + header_bytes > file_bytes:
                raise _broken(path, f"its header needs {8 + header_bytes:,} bytes and the file has {file_bytes:,}")
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}; make it readable.") from error
    try:
        header = json.loads(text, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    infos = {name: _tensor(path, name, values, data_start) for name, values in header.items()}
    end = data_start
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if info.start != end:
            raise _broken(path, f"tensor {name} begins at byte {info.start:,}, where {end:,} is due")
        end += info.num_bytes
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is cut short: its header names tensors up to byte {end:,}, and the file has {file_bytes:,}; copy "
            "or download it again."
        )
    if end < file_bytes:
        raise _broken(path, f"its tensors end at byte {end:,}, and the file has {file_bytes:,}")
    return infos


def _tensor(path: Path, name: str, values: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = values["dtype"], values["shape"], values["data_offsets"]
        plain = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        plain = False
    if not plain or not isinstance(dtype, str) or begin > end:
        raise _broken(path, f"the header's entry of tensor {name} is {values!r:.100}")
    if dtype in DTYPE_BYTES and end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        raise _broken(path, f"tensor {name} of {dtype} {list(shape)} has {end - begin:,} bytes of data")
    return TensorInfo(path, dtype, tuple(shape), data_start + begin, end - begin)


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads, which would keep the last of two values under one name. Raises ValueError."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it names {name} twice")
        found[name] = value
    return found


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is no whole safetensors file: {what}; copy or download it again.")
