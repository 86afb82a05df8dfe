"""`headway export RUN_DIR OUT_DIR`: a run's newest checkpoint, or the one that is named, as a model directory for
transformers and whoever reads its format.

The checkpoint has that form already, with the learner's float32 weights; the export rounds them to the dtype that
config.json names, which the source model came in, and splits what is larger than SHARD_BYTES. OUT_DIR appears whole, or
not at all.
"""

import os
import shutil
from pathlib import Path

from pipeline.checkpoints.marker import MARKER, Incomplete, check_complete
from pipeline.checkpoints.model_files import TOKENIZER_FILES, json_bytes, model_dtype, read_model_files
from pipeline.checkpoints.saved import checkpoint_version, refuse_damaged, run_checkpoint
from pipeline.errors import ConfigError
from pipeline.run_dir.synced_files import sync_directory, write_files
from workers.errors import CheckpointError
from workers.machine.disk_space import require_space
from workers.model_files.config import read_model_config
from workers.model_files.safetensors_header import DTYPE_BYTES, DTYPE_NAMES, TensorInfo
from workers.model_files.tensor_files import INDEX, SINGLE, check_tensors

SHARD_BYTES = 5 * 10**9  # as most published models are split
_BYTES_OF = {name: DTYPE_BYTES[code] for code, name in DTYPE_NAMES.items()}


def export(run_dir: str, out_dir: str) -> str:
    """run_dir: may be one of its checkpoints, too. Returns what was done, in words. Raises ConfigError for directories
    that won't do, CheckpointError when the checkpoint is not whole or the disk too small.
    """
    checkpoint = _checkpoint(Path(run_dir))
    out = Path(out_dir).resolve()
    _check_out(out)
    tensors = check_tensors(checkpoint, read_model_config(checkpoint))
    dtype, files = model_dtype(checkpoint), read_model_files(checkpoint)
    shards = plan_shards(tensors, _BYTES_OF[dtype], SHARD_BYTES)
    num_bytes = sum(info.num_elements for info in tensors.values()) * _BYTES_OF[dtype]
    require_space(out.parent, num_bytes + sum(map(len, files.values())))
    if len(shards) > 1:
        weight_map = {name: file for file, shard in shards.items() for name in shard}
        files[INDEX] = json_bytes(
            {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        )
    temporary = out.parent / f".{out.name}.headway-export"
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        write_files(temporary, files)
        _write_weights(temporary, shards, dtype)
        sync_directory(temporary)
        os.rename(temporary, out)  # an empty directory in its place is replaced
        sync_directory(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} can't be made: {error.strerror}; name another new directory.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _told(
        out_dir, checkpoint, files, f"{len(shards)} file{'s' * (len(shards) > 1)} of {num_bytes:,} bytes, {dtype}"
    )


def _checkpoint(path: Path) -> Path:
    if not os.path.lexists(path / MARKER):
        return run_checkpoint(path)
    try:
        check_complete(path, checkpoint_version(path))
    except Incomplete as error:
        raise ConfigError(f"The checkpoint {path} is incomplete: {error}. Name another one.") from error
    refuse_damaged(path)
    return path


def plan_shards(
    tensors: dict[str, TensorInfo], element_bytes: int, shard_bytes: int
) -> dict[str, dict[str, TensorInfo]]:
    """File name -> the tensors in it, in their order: as many as fit into `shard_bytes`, at least one."""
    shards: list[dict[str, TensorInfo]] = []
    left = 0
    for name, info in tensors.items():
        num_bytes = info.num_elements * element_bytes
        if not shards or num_bytes > left:
            shards.append({})
            left = shard_bytes
        shards[-1][name] = info
        left -= num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _write_weights(directory: Path, shards: dict[str, dict[str, TensorInfo]], dtype: str) -> None:
    # Here and not at the top: it loads torch, which the command line, and every supervisor, does without.
    import torch

    from workers.model_files.flat_weights import mapped_tensors, write_tensors

    for file, infos in shards.items():
        write_tensors(directory / file, dict(mapped_tensors(infos)), getattr(torch, dtype))


def _check_out(out: Path) -> None:
    """OUT_DIR must be new, or an empty directory, in a place that can be written to."""
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"{out} is not a directory; name a new one.")
    if out.is_dir() and os.listdir(out):
        raise ConfigError(f"{out} is not empty; name a new directory, so that no other model's files mix with these.")
    parent = out.parent
    if not parent.is_dir():
        raise ConfigError(f"{out} can't be made: {parent} is no directory; make it first.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} can't be made: {parent} can't be written to; name another place.")


def _told(out: str, checkpoint: Path, files: dict[str, bytes], weights: str) -> str:
    told = f"{out}: {checkpoint}, {weights}"
    if not files.keys() & set(TOKENIZER_FILES):
        told += (
            f"\nThere is no tokenizer in it: {checkpoint} has none, for a built-in model's words are Headway's own; "
            "transformers loads the weights alone."
        )
    return told
