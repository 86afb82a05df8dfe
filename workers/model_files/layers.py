"""Which layers of a config.json see only a window, and which do not rotate: each model type has rules of its own."""

from workers.model_files.json_keys import ConfigFile


def nope_layers_of(keys: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """SmolLM3's `no_rope_layers` has a 0 where a layer does *not* rotate."""
    flags = keys.values.get("no_rope_layers")
    if flags is None:
        interval = keys.count("no_rope_layer_interval", 4)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        keys.refuse("no_rope_layers", flags, f"give a list of 0 and 1, one for each of the {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not flags[layer])


def layer_windows_of(
    keys: ConfigFile, model_type: str, num_layers: int, nope_layers: tuple[int, ...]
) -> tuple[int, ...]:
    """Each layer's window by its model type's own rule; 0: the layer sees everything before it."""
    window = keys.count("sliding_window", None if model_type == "llama" else ..., null=True)
    types = keys.values.get("layer_types")
    if types is not None and (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in ("full_attention", "sliding_attention") for kind in types)
    ):
        keys.refuse(
            "layer_types", types, f"give full_attention or sliding_attention for each of the {num_layers} layers"
        )
    if model_type in ("llama", "mistral"):
        if model_type == "llama" and window is not None and window < keys.count("max_position_embeddings"):
            keys.refuse("sliding_window", window, "models of type llama have none: use null, or the type mistral")
        window = window or 0 if model_type == "mistral" else 0
        kind = "sliding_attention" if window else "full_attention"
        if types is not None and any(own != kind for own in types):
            keys.refuse("layer_types", types, f"layers of type {model_type} are all alike, here {kind}")
        return (window,) * num_layers
    uses_window = keys.flag("use_sliding_window", False)
    if types is None:
        if not uses_window or window is None:
            return (0,) * num_layers
        if model_type == "smollm3":
            return tuple(window if layer in nope_layers else 0 for layer in range(num_layers))
        first = keys.count("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if "sliding_attention" in types and (not uses_window or window is None):
        keys.refuse("layer_types", types, "sliding_attention needs use_sliding_window true and a sliding_window")
    return tuple(window if kind == "sliding_attention" and window else 0 for kind in types)
