"""Hugging Face's name of each piece of our weights, and where the piece lies in a flat buffer. A leaf: no torch.

Our fused tensors are Hugging Face's stacked by rows (queries, keys, values; gate, up), so each of theirs is one
unbroken piece of the buffer: reading and writing a checkpoint are copies, without any transposition.
"""

from math import prod
from typing import NamedTuple

from workers.model_config import ModelConfig, layout

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Place(NamedTuple):
    """A Hugging Face tensor: `shape` row-major from element `offset` of the flat buffer."""

    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def hf_places(config: ModelConfig) -> dict[str, Place]:
    """Every tensor of the model's checkpoint by name, in the buffer's order; a tied head is none of its own."""
    places = {}
    for entry in layout(config).entries:
        offset = entry.offset
        for name, num_rows in _pieces(entry.name, entry.shape[0], config):
            place = Place((num_rows, *entry.shape[1:]), offset)
            places[name] = place
            offset += place.num_elements
    return places


def _pieces(ours: str, num_rows: int, config: ModelConfig) -> list[tuple[str, int]]:
    """(Hugging Face's name, rows) of what the rows of our tensor `ours` are, from the first row on."""
    if ours in _OUTSIDE:
        return [(_OUTSIDE[ours], num_rows)]
    _, layer, own = ours.split(".")
    prefix = f"model.layers.{layer}."
    part = "bias" if own.endswith("_bias") else "weight"
    match own.removesuffix("_bias"):
        case "qkv":
            q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            pieces = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        case "gate_up":
            pieces = [("mlp.gate_proj", num_rows // 2), ("mlp.up_proj", num_rows // 2)]
        case name:
            pieces = [(_IN_LAYER[name], num_rows)]
    return [(f"{prefix}{name}.{part}", rows) for name, rows in pieces]


_OUTSIDE = {"embed": EMBEDDING, "head": HEAD, "final_norm": "model.norm.weight"}
_IN_LAYER = {
    "out": "self_attn.o_proj",
    "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
