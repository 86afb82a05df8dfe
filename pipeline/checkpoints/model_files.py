"""The files of a model directory beside its weights: read when a run begins, so that its checkpoints have them whatever
becomes of the directory meanwhile.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from workers.errors import CheckpointError
from workers.model_config import ModelConfig
from workers.model_files.config import read_model_config, to_hf_config
from workers.model_files.safetensors_header import DTYPE_NAMES
from workers.model_files.tensor_files import check_tensors

CONFIG = "config.json"
# What transformers reads of a language model; a directory holds some of them.
COPIED = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
COPIED_PATTERNS = ("additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def read_model_files(directory: Path | str) -> dict[str, bytes]:
    """Path within the directory -> contents. config.json tells the dtype: the tensors', if it says nothing itself, as
    transformers takes it. Raises ConfigError for a dtype that no export could have.
    """
    directory = Path(directory)
    paths = [directory / name for name in COPIED if (directory / name).is_file()]
    paths += [path for pattern in COPIED_PATTERNS for path in sorted(directory.glob(pattern)) if path.is_file()]
    try:
        files = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be read: {error.strerror}; make it readable.") from error
    values, path = _config_values(files, directory), directory / CONFIG
    dtype = _dtype_of(values)
    if dtype is not None and dtype not in DTYPE_NAMES.values():
        raise ConfigError(_dtype_refusal(path, dtype))  # now, for what the run saves is to be exported in it
    if dtype is None:
        tensors = check_tensors(directory, read_model_config(directory))
        files[CONFIG] = json_bytes(values | {"dtype": DTYPE_NAMES[next(iter(tensors.values())).dtype]})
    return files


def own_model_files(config: ModelConfig, stop_ids: Sequence[int]) -> dict[str, bytes]:
    """For a model of ours, which begins from random weights: a config.json alone. Raises ModelConfigError for a model
    that no family of Hugging Face has.
    """
    ids = {"bos_token_id": None, "eos_token_id": list(stop_ids), "pad_token_id": None}
    return {CONFIG: json_bytes(to_hf_config(config) | ids | {"dtype": "float32"})}


def model_dtype(directory: Path) -> str:
    """What config.json of a checkpoint says that the weights are to be kept in: float32, bfloat16 or float16."""
    path = directory / CONFIG
    dtype = _dtype_of(json.loads(path.read_bytes()))
    if dtype not in DTYPE_NAMES.values():
        raise CheckpointError(_dtype_refusal(path, dtype))
    return dtype


def _config_values(files: dict[str, bytes], directory: Path) -> dict[str, Any]:
    """config.json was whole when the model was opened, but its owner may have touched it since."""
    try:
        values = json.loads(files[CONFIG])
    except (KeyError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{directory / CONFIG} is no longer what it was; put the model's own file back.")
    return values


def _dtype_refusal(path: Path, dtype: Any) -> str:
    return f"{path} names the dtype {dtype!r:.100}; it must be one of {', '.join(DTYPE_NAMES.values())}."


def _dtype_of(values: dict[str, Any]) -> Any:
    return values.get("dtype") or values.get("torch_dtype")  # the second is the key's older name


def json_bytes(values: dict[str, Any]) -> bytes:
    """As such files are written, for people to read."""
    return (json.dumps(values, indent=2) + "\n").encode()
