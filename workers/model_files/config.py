"""A model directory's `config.json` -> ModelConfig, and back. A leaf: no torch, no transformers.

Strict: whatever would make this decoder compute something else than Hugging Face transformers does is refused, in one
sentence that names the file, the key and its value. A missing key means what that library's configuration class of the
same `model_type` takes it to mean; a test compares each default with those classes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.errors import ModelConfigError
from workers.model_config import MAX_LAYERS, ModelConfig
from workers.model_files.json_keys import ConfigFile
from workers.model_files.layers import layer_windows_of, nope_layers_of
from workers.model_files.rope import read_rope, rope_keys

_MAX_BYTES = 4 << 20  # the largest config.json of a published model has some 100 KB

# What a missing key means, by model type. head_dim None: hidden_size / num_attention_heads; num_key_value_heads None:
# as many as query heads.
_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _COMMON
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "qwen3": _COMMON
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "smollm3": _COMMON
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
}
# Keys that change what a model computes in ways that this decoder does not have. A value in the tuple is harmless.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "quantization": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "per_layer_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


def read_model_config(directory: str | Path) -> ModelConfig:
    """The decoder that `directory`/config.json describes; ModelConfigError for one that is not ours to compute."""
    path = Path(directory) / "config.json"
    return parse_model_config(_read_json(path), str(path))


def parse_model_config(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """As `read_model_config`, of a config.json's contents; `where` names it in errors."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        raise ModelConfigError(
            f"{where}: model_type is {model_type!r:.100}, which is no decoder that is built in; supported are "
            f"{', '.join(DEFAULTS)}."
        )
    keys = ConfigFile(where, values, DEFAULTS[model_type])
    _refuse_other_decoders(keys)
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    head_dim = keys.count("head_dim", null=model_type != "qwen3")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelConfigError(
                f"{where}: hidden_size is {hidden_size} and num_attention_heads {num_heads}, which does not divide it; "
                "write head_dim."
            )
        head_dim = hidden_size // num_heads
    num_layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    nope_layers = nope_layers_of(keys, num_layers) if model_type == "smollm3" else ()
    windows = layer_windows_of(keys, model_type, num_layers, nope_layers)
    # Only these types have the key; for the others transformers does not look at it.
    all_bias = keys.flag("attention_bias", False) if model_type in ("llama", "qwen3", "smollm3") else False
    max_positions = keys.count("max_position_embeddings")
    rope, theta = read_rope(keys, max_positions)
    if rope.kind == "yarn":  # its factor says how far it reaches, whether or not the file's length was raised to that
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    try:
        return ModelConfig(
            vocab_size=keys.count("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=keys.count("num_key_value_heads", null=True) or num_heads,
            head_dim=head_dim,
            intermediate_size=keys.count("intermediate_size"),
            rope_theta=theta,
            rms_norm_eps=keys.number("rms_norm_eps"),
            max_positions=max_positions,
            tie_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=all_bias or model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            mlp_bias=keys.flag("mlp_bias", False) if model_type in ("llama", "smollm3") else False,
            out_bias=all_bias,
            rope=rope,
            layer_windows=windows if any(windows) else (),
            nope_layers=nope_layers,
        )
    except ModelConfigError as error:
        raise ModelConfigError(f"{where}: {error}") from None


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json, as values, of a model of ours that came without one: `parse_model_config` reads it back to
    `config`, but for its tokenizer's ids. The first family that can say it; ModelConfigError when none can.
    """
    config = replace(config, num_token_ids=None, unused_ids=())
    architectures = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    }
    for model_type, architecture in architectures.items():
        written = {"architectures": [architecture], "model_type": model_type} | _write(config, model_type)
        try:
            # How far yarn reaches may be cut in ours; a file can't say so.
            if replace(parse_model_config(written), max_positions=config.max_positions) == config:
                return written
        except ModelConfigError:
            continue
    raise ModelConfigError(
        f"No model type of Hugging Face has all that this model configuration asks for ({', '.join(architectures)} "
        "were tried); change its biases, qk_norm, layer_windows or nope_layers to those of one of them."
    )


def _write(config: ModelConfig, model_type: str) -> dict[str, Any]:
    written = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    } | rope_keys(config.rope, config.rope_theta)
    if model_type in ("llama", "qwen3", "smollm3"):
        written["attention_bias"] = config.out_bias
    if model_type in ("llama", "smollm3"):
        written["mlp_bias"] = config.mlp_bias
    window = max(config.windows)
    if model_type == "mistral":
        written["sliding_window"] = window or None
    elif model_type != "llama":
        written["use_sliding_window"] = window > 0
        written["sliding_window"] = window or None
        written["layer_types"] = ["sliding_attention" if own else "full_attention" for own in config.windows]
    if model_type == "smollm3":
        written["no_rope_layers"] = [int(layer not in config.nope_layers) for layer in range(config.num_layers)]
    return written


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ModelConfigError(
            f"{path!s:.300} can't be read ({getattr(error, 'strerror', None) or error}); name a directory that holds a "
            "Hugging Face model."
        ) from None
    if len(raw) > _MAX_BYTES:
        raise ModelConfigError(f"{path} has more than {_MAX_BYTES >> 20} MiB; that is no model configuration.")
    try:
        values = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
        raise ModelConfigError(f"{path} is not JSON ({what}); put the model's own file back.") from None
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path} holds {values!r:.100}; a model configuration is a JSON object.")
    return values


def _refuse_other_decoders(keys: ConfigFile) -> None:
    for name, harmless in _REFUSED.items():
        value = keys.values.get(name)
        if not any(value is good or (type(value) is type(good) and value == good) for good in harmless):
            keys.refuse(name, value, "this decoder has nothing of the kind: give a dense, unquantised decoder")
    activation = keys.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        keys.refuse("hidden_act", activation, "supported is silu")
