"""From what a user calls a model to everything that a run must know of it, checked before any process starts. No torch.

A model is `tiny`, a Hugging Face model directory, or what a run saved. Nothing is ever downloaded.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.chat.format import ChatFormat
from pipeline.chat.model_chat import load_chat
from pipeline.chat.tool_formats import FORMATS
from pipeline.checkpoints.model_files import CONFIG, TOKENIZER_FILES
from pipeline.checkpoints.saved import refuse_damaged, weights_directory
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.run_dir.run_files import is_run_directory
from pipeline.wording import shown
from shm.errors import HeadwayError
from workers.model_config import ModelConfig
from workers.model_files.config import read_model_config
from workers.model_files.safetensors_header import DTYPE_NAMES
from workers.model_files.tensor_files import check_tensors, other_weights

TINY_NAME = "tiny"
TOOL_FORMATS = ("auto", *sorted(FORMATS))
SPEECH_FILES = (*TOKENIZER_FILES, "tokenizer_config.json", "vocab.json", "chat_template.jinja")
# What a run may compute in its own way with the weights of another: where contexts end, and which ids have a token.
_MAY_DIFFER = ("max_positions", "rope", "num_token_ids", "unused_ids")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as a run starts from it."""

    directory: str | None  # absolute; None: tiny, which has no files
    weights: str | None  # the directory that holds the first weights, absolute; None: random ones
    config: ModelConfig
    chat: ChatFormat
    dtype: str | None = None  # of the tensors in `weights`; the widest of them
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str = "auto"

    def describe(self) -> dict[str, Any]:
        """Plain values, as config.json records them."""
        return {
            "directory": self.directory,
            "weights": self.weights,
            "dtype": self.dtype,
            "chat": type(self.chat).__name__,
            "template_options": dict(self.template_options),
            "tool_format": self.tool_format,
            "config": self.config.to_fields(),
        }


def open_model(
    path: str | os.PathLike[str],
    *,
    init: str | os.PathLike[str] | None = None,
    chat: ChatFormat | None = None,
    template_options: Mapping[str, Any] | None = None,
    tool_format: str = "auto",
) -> ModelSource:
    """The model in the directory `path`. Raises ConfigError for whatever is wrong with it.

    init: a run or another model directory of the same architecture that the weights come from instead. chat: in place
    of the directory's own tokenizer and template, to which template_options and tool_format belong.
    """
    directory = find_model(path)
    weights = directory if init is None else find_weights(init)
    options = dict(template_options or {})
    try:
        config = read_model_config(directory)
        if chat is None:
            chat = load_chat(directory, options=options, tool_format=tool_format)
        if weights != directory:
            _check_same_model(weights, config, directory)
        config = with_ids_of(config, chat, directory)
        dtype = _check_weights(weights, config)
    except ConfigError:
        raise
    except HeadwayError as error:  # of a layer below, which knows nothing of options
        raise ConfigError(str(error)) from error
    return ModelSource(
        directory=str(directory),
        weights=str(weights),
        config=config,
        chat=chat,
        dtype=dtype,
        template_options=options,
        tool_format=tool_format,
    )


def open_tiny(config: ModelConfig, chat: ChatFormat, init: str | os.PathLike[str] | None = None) -> ModelSource:
    """A model without files of its own; init: a run of the same one, whose weights it starts from."""
    if config.vocab_size < chat.vocab_size:
        raise ConfigError(
            f"model_config has a vocab_size of {config.vocab_size}, but chat writes ids up to {chat.vocab_size - 1}; "
            f"make it at least {chat.vocab_size}."
        )
    if config.vocab_size > chat.vocab_size:
        config = replace(config, num_token_ids=chat.vocab_size)
    if init is None:
        return ModelSource(directory=None, weights=None, config=config, chat=chat)
    weights = find_weights(init)
    try:
        _check_same_model(weights, config, "tiny")
        dtype = _check_weights(weights, config)
    except HeadwayError as error:
        raise ConfigError(str(error)) from error
    return ModelSource(directory=None, weights=str(weights), config=config, chat=chat, dtype=dtype)


def with_ids_of(config: ModelConfig, chat: ChatFormat, directory: Path) -> ModelConfig:
    """`config` with the ids that `chat` knows: the embedding may have more rows, and those must never be sampled."""
    if chat.vocab_size > config.vocab_size:
        raise ConfigError(
            f"The tokenizer in {directory} has ids up to {chat.vocab_size - 1:,}, but the model's embedding only "
            f"{config.vocab_size:,} rows (vocab_size in config.json); give the tokenizer that belongs to this model."
        )
    return replace(config, num_token_ids=chat.vocab_size, unused_ids=tuple(getattr(chat, "unused_ids", ())))


def find_model(path: str | os.PathLike[str], where: str = "model") -> Path:
    """The absolute path of a directory that may hold a model. Raises ConfigError, naming `where` it was given."""
    directory = _find_directory(path, where)
    if is_run_directory(directory):
        init = where.replace("model", "init")  # in the form in which this one was given
        raise ConfigError(f"{where} is {path}, the directory of a run; to go on from its weights, give it as {init}.")
    if not os.path.lexists(directory / CONFIG) and (told := other_weights(directory)):
        raise ConfigError(told)
    return directory


def find_weights(path: str | os.PathLike[str], where: str = "init") -> Path:
    """The model directory that `path` stands for: itself, or the newest checkpoint of a run."""
    return Path(os.path.abspath(weights_directory(_find_directory(path, where))))


def says_how_it_speaks(directory: str | os.PathLike[str]) -> bool:
    """Whether a model has files of a tokenizer, whole or not; what a run of the tiny one saves has none."""
    return any(os.path.lexists(os.path.join(directory, name)) for name in SPEECH_FILES)


def _find_directory(path: str | os.PathLike[str], where: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise ConfigTypeError(f"{where} is {shown(path)}; name a directory.")
    if os.path.isdir(path):
        return Path(os.path.abspath(path))
    if os.path.lexists(path):
        raise ConfigError(f"{where} is {str(path)!r}, which is no directory; name the directory that it lies in.")
    # A path whose first part is here is a slip of the pen, such as `runs/smo`.
    if isinstance(path, str) and _HUB_NAME.fullmatch(path) and not os.path.isdir(path.partition("/")[0]):
        target = path.partition("/")[2]
        raise ConfigError(
            f"{where} is {path!r}, which is no directory here, and nothing is downloaded; if it is a model of the "
            f"Hugging Face Hub, get it once with: hf download {path} --local-dir {target}, and give that "
            "directory."
        )
    may_be_tiny = where.lstrip("-").startswith("model")
    names = f'neither "{TINY_NAME}" nor a directory' if may_be_tiny else "no directory"
    raise ConfigError(f"{where} is {str(path)!r}, which is {names}; correct the path.")


def _check_same_model(weights: Path, config: ModelConfig, model: Path | str) -> None:
    """Refuse weights of a model that computes something else: before a list of all its tensors does."""
    theirs, ours = asdict(read_model_config(weights)), asdict(config)
    differing = [name for name in ours if name not in _MAY_DIFFER and ours[name] != theirs[name]]
    if differing:
        told = ", ".join(f"{name} {theirs[name]} (here {ours[name]})" for name in differing)
        raise ConfigError(
            f"The weights in {weights} are of another model than {model}: {told}; start from one of the same "
            "architecture."
        )


def _check_weights(directory: Path, config: ModelConfig) -> str:
    """The dtype of the tensors, all of which are there and fit; CheckpointError lists what is not. What a run saved is
    compared with what it saved, too: see `refuse_damaged`.
    """
    refuse_damaged(directory)
    found = {DTYPE_NAMES[info.dtype] for info in check_tensors(directory, config).values()}
    return "float32" if "float32" in found else sorted(found)[0]
