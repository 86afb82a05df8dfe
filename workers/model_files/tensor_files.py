"""What a Hugging Face model directory holds, checked against what the model needs before any tensor is read. A leaf: no
torch.

Strict: whatever is missing, unknown or of another shape is listed and refused, and nothing is filled in. Two kinds of
extra tensors are let through: `….rotary_emb.inv_freq`, which old checkpoints carry and every loader computes instead,
and an `lm_head.weight` beside a tied embedding that is its equal, byte for byte.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from workers.errors import CheckpointError
from workers.model_config import ModelConfig
from workers.model_files.safetensors_header import DTYPE_BYTES, TensorInfo, read_header, refuse_duplicates
from workers.model_files.tensor_names import EMBEDDING, HEAD, hf_places

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OPTIMIZER = "optimizer.safetensors"  # of a checkpoint, beside its weights
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of peft, beside or without a model
MAX_LISTED = 20  # names in one sentence
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
NO_WEIGHTS = ("training_args.bin", "state.msgpack", "complete.msgpack")  # the last two of our own checkpoints
COMPARED_BYTES = 1 << 24


def find_tensors(directory: Path | str) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint, single or sharded, with its file. Raises CheckpointError unless its files are
    whole and agree with the index.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; name the directory of a model.")
    single, index = (os.path.lexists(directory / name) for name in (SINGLE, INDEX))
    if (single or index) and os.path.lexists(directory / ADAPTER_CONFIG):
        raise CheckpointError(
            f"{directory} holds an adapter ({ADAPTER_CONFIG}) beside a model, so which weights are meant is open; "
            "merge the two, as peft's merge_and_unload does, or remove the adapter's files."
        )
    if single and index:
        raise CheckpointError(
            f"{directory} holds both {SINGLE} and {INDEX}, so which weights are meant is open; remove one of them."
        )
    if single:
        return read_header(directory / SINGLE)
    if index:
        return _find_sharded(directory)
    raise CheckpointError(_no_weights(directory))


def check_tensors(directory: Path | str, config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors that `config`'s model is loaded from, all of them and no others. Raises CheckpointError with
    everything that is missing, unexpected, mis-shaped or of a dtype that can't be loaded.
    """
    found = find_tensors(directory)
    places = hf_places(config)
    infos = {name: found[name] for name in places if name in found}
    extra = [name for name in found if name not in places and not name.endswith(IGNORED_SUFFIX)]
    if config.tie_embeddings and HEAD in extra:
        extra.remove(HEAD)
        if EMBEDDING in found:
            _check_copy(directory, found[HEAD], found[EMBEDDING])
    shapes = [
        f"{name} {list(info.shape)} where the model has {list(places[name].shape)}"
        for name, info in infos.items()
        if info.shape != places[name].shape
    ]
    dtypes = [f"{name} ({info.dtype})" for name, info in infos.items() if info.dtype not in DTYPE_BYTES]
    missing = [name for name in places if name not in found]
    faults = [
        (f"missing {listed(missing)}", missing),
        (f"unexpected {listed(extra)}", extra),
        (f"of another shape {listed(shapes)}", shapes),
        (f"of a dtype that isn't float32, bfloat16 or float16 {listed(dtypes)}", dtypes),
    ]
    if said := [text for text, names in faults if names]:
        advice = "give the whole checkpoint, with the config.json that belongs to it"
        if missing == [HEAD]:
            advice = (
                f"set tie_word_embeddings to true in config.json if the embedding is the head too, or else {advice}"
            )
        raise CheckpointError(
            f"{directory} doesn't hold this model's tensors: {'; '.join(said)}. Nothing is filled in: {advice}."
        )
    return infos


def listed(names: Sequence[str]) -> str:
    """`a, b and 3 more`."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _find_sharded(directory: Path) -> dict[str, TensorInfo]:
    weight_map = _read_weight_map(directory / INDEX)
    files = sorted(set(weight_map.values()))
    if absent := [file for file in files if not (directory / file).is_file()]:
        raise CheckpointError(
            f"{directory} lacks the files {listed(absent)}, where {INDEX} places "
            f"{listed([name for name, file in weight_map.items() if file in absent])}; copy or download them."
        )
    headers = {file: read_header(directory / file) for file in files}
    lacking = [f"{name} (not in {file})" for name, file in weight_map.items() if name not in headers[file]]
    unnamed, doubled = [], []
    for file, header in headers.items():
        for name in header:
            if weight_map.get(name) != file:
                (doubled if name in weight_map else unnamed).append(f"{name} (in {file})")
    faults = [
        (f"it places tensors where they aren't: {listed(lacking)}", lacking),
        (f"it doesn't name {listed(unnamed)}", unnamed),
        (f"it places elsewhere what is also here: {listed(doubled)}", doubled),
    ]
    if said := [text for text, names in faults if names]:
        raise CheckpointError(
            f"{directory / INDEX} and its files don't agree: {'; '.join(said)}. Copy or download all of them again."
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name within the directory."""
    try:
        values = json.loads(path.read_bytes(), object_pairs_hook=refuse_duplicates)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}; make it readable.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no index of safetensors files ({error}); copy or download it again."
        ) from None
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files; copy or download it again.")
    for name, file in weight_map.items():
        # A name, not a path: an index must not make anybody read files elsewhere.
        if not isinstance(file, str) or not file.endswith(".safetensors") or {"/", "\\", "\0"} & set(file):
            raise CheckpointError(
                f"{path} places {name} in {file!r:.100}; a shard is a .safetensors file beside the index: put it there."
            )
    return weight_map


def other_weights(directory: Path | str) -> str | None:
    """What a directory holds in the place of a model's safetensors, and how to make a model of it; None if it is
    nothing known.
    """
    names = sorted(os.listdir(directory))
    if ADAPTER in names:
        return (
            f"{directory} holds an adapter ({ADAPTER}) without the model it belongs to; merge the two, as peft's "
            "merge_and_unload does, and give the merged model."
        )
    others = [name for name in names if name.endswith(OTHER_FORMATS) and name not in NO_WEIGHTS]
    if not others or any(name.endswith(".safetensors") for name in names):
        return None
    source = f"gguf_file={others[0]!r}" if others[0].endswith(".gguf") else ""
    arguments = ", ".join(part for part in (f"{str(directory)!r}", source) if part)
    return (
        f"{directory} holds weights only as {listed(others)}, and Headway reads safetensors alone; convert them once "
        f"with transformers: AutoModelForCausalLM.from_pretrained({arguments}).save_pretrained(NEW_DIR)."
    )


def _no_weights(directory: Path) -> str:
    """Why there is nothing to load, from what is there instead."""
    if told := other_weights(directory):
        return told
    shards = [name for name in sorted(os.listdir(directory)) if name.endswith(".safetensors")]
    if shards:
        return f"{directory} holds {listed(shards)}, but neither {SINGLE} nor {INDEX}; add the index that names them."
    return f"{directory} holds no weights, neither {SINGLE} nor {INDEX}; name the directory of a whole model."


def _check_copy(directory: Path | str, head: TensorInfo, embedding: TensorInfo) -> None:
    """A tied model's own head must be the embedding once more, or one of the two would be dropped unseen."""
    if (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        one == other for one, other in zip(_data(head), _data(embedding), strict=True)
    ):
        return
    raise CheckpointError(
        f"{directory} ties head and embedding (tie_word_embeddings), but its {HEAD} differs from {EMBEDDING}, and only "
        f"one of them could be used; set tie_word_embeddings to false to use both, or remove {HEAD} from the file."
    )


def _data(info: TensorInfo) -> Iterable[bytes]:
    with open(info.file, "rb") as file:
        file.seek(info.start)
        left = info.num_bytes
        while left:
            data = file.read(min(left, COMPARED_BYTES))
            if not data:
                raise CheckpointError(f"{info.file} has become shorter while it was read; copy or download it again.")
            left -= len(data)
            yield data
