"""The shape of a decoder, as plain numbers, and where its tensors lie in a flat buffer. A leaf: no torch."""

from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

from shm.layout import Entry, WeightLayout
from workers.errors import ModelConfigError
from workers.rope_scaling import LARGEST_FLOAT, SMALLEST_FLOAT, RopeScaling

MAX_COUNT = 2**31 - 1  # no tensor of a real model is longer
MAX_LAYERS = 10_000  # far more than any model has; each takes an entry in several lists


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the Llama family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Qwen2 adds `qkv_bias`, Qwen3 `qk_norm`; `out_bias` and `mlp_bias` are Llama's `attention_bias` (with `qkv_bias`) and
    `mlp_bias`; Mistral has `layer_windows`, SmolLM3 `nope_layers`. Names follow Hugging Face's `config.json` where it
    has one. `num_token_ids` and `unused_ids` are the tokenizer's: embeddings are often padded to a round number, and a
    row without a token must never be sampled.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048  # length of the RoPE table: no context can be longer
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    out_bias: bool = False
    rope: RopeScaling = RopeScaling()
    layer_windows: tuple[int, ...] = ()  # per layer, how many positions back it sees, its own included; 0: all
    nope_layers: tuple[int, ...] = ()  # layers that do not rotate, ascending
    num_token_ids: int | None = None  # ids at or beyond it do not exist: logits end there; None: vocab_size
    unused_ids: tuple[int, ...] = ()  # ids below it that do not exist either, ascending: their logits are -inf

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value, most = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_COUNT
            if type(value) is not int or not 1 <= value <= most:
                raise ModelConfigError(
                    f"ModelConfig.{name} is {value!r:.100}; it counts something, so give an integer from 1 to {most:,}."
                )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            # As the learner's float32 has it: 0 there would make every norm or every rotation NaN.
            if type(value) not in (int, float) or not SMALLEST_FLOAT <= value <= LARGEST_FLOAT:
                raise ModelConfigError(
                    f"ModelConfig.{name} is {value!r:.100}; it must be a finite number above 0, within float32."
                )
        for name in _FLAGS:
            value = getattr(self, name)
            if type(value) is not bool:
                raise ModelConfigError(f"ModelConfig.{name} is {value!r:.100}; it is a flag: write True or False.")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"ModelConfig has {self.num_heads} query heads and {self.num_kv_heads} key/value heads; each key/value "
                "head serves equally many query heads, so make num_heads a multiple of num_kv_heads."
            )
        if self.head_dim % 2:
            raise ModelConfigError(
                f"ModelConfig.head_dim is {self.head_dim}; RoPE rotates pairs of features, so make it even."
            )
        if not isinstance(self.rope, RopeScaling):
            raise ModelConfigError(f"ModelConfig.rope is {self.rope!r:.100}; give a RopeScaling.")
        if self.rope.kind == "dynamic" and self.max_positions > self.rope.original_max_positions:
            raise ModelConfigError(
                f"ModelConfig.max_positions is {self.max_positions:,}, but dynamic rope scaling changes all rotations "
                f"with the length from {self.rope.original_max_positions:,} positions on; use at most that many."
            )
        if self.rope.kind == "yarn" and self.rope_theta <= 1.0:
            raise ModelConfigError(f"ModelConfig.rope_theta is {self.rope_theta}; yarn needs one above 1.")
        self._check_layers()
        self._check_ids()

    def _check_layers(self) -> None:
        _check_whole_numbers("layer_windows", self.layer_windows, MAX_COUNT + 1)
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ModelConfigError(
                f"ModelConfig.layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers; give "
                "one for each, or none."
            )
        _check_whole_numbers("nope_layers", self.nope_layers, self.num_layers, ascending=True)

    def _check_ids(self) -> None:
        num = self.num_token_ids
        if num is not None and (type(num) is not int or not 1 <= num <= self.vocab_size):
            raise ModelConfigError(
                f"ModelConfig.num_token_ids is {num!r:.100}; it counts ids that have an embedding, so give an integer "
                f"from 1 to vocab_size, {self.vocab_size:,}, or None."
            )
        _check_whole_numbers("unused_ids", self.unused_ids, self.num_ids, ascending=True)
        if len(self.unused_ids) == self.num_ids:
            raise ModelConfigError(f"ModelConfig.unused_ids names all {self.num_ids:,} ids; no token would be left.")

    @property
    def num_ids(self) -> int:
        """Ids that exist, holes included: [0, num_ids)."""
        return self.vocab_size if self.num_token_ids is None else self.num_token_ids

    @property
    def windows(self) -> tuple[int, ...]:
        """Each layer's window, 0 for none."""
        return self.layer_windows or (0,) * self.num_layers

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value matrix."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def to_fields(self) -> dict[str, Any]:
        """Plain values for a message."""
        return asdict(self)

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> "ModelConfig":
        """The inverse of `to_fields`; ModelConfigError when a field is unknown or missing."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ModelConfigError(
                f"A model configuration has the unknown fields {unknown}; its fields are {sorted(known)}."
            )
        values = dict(values)
        if "rope" in values:
            values["rope"] = RopeScaling.from_fields(values["rope"])
        for name in _TUPLES:
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelConfigError(
                f"A model configuration is not whole ({error}); give every field without default."
            ) from None


def _check_whole_numbers(name: str, values: Any, end: int, ascending: bool = False) -> None:
    """ModelConfigError unless `values` is a tuple of integers in [0, end), each above the one before if so asked."""
    is_good = isinstance(values, tuple) and all(type(value) is int and 0 <= value < end for value in values)
    if is_good and ascending:
        is_good = all(first < second for first, second in zip(values, values[1:], strict=False))
    if not is_good:
        order = ", each above the one before it" if ascending else ""
        raise ModelConfigError(
            f"ModelConfig.{name} is {values!r:.100}; give a tuple of integers from 0 to {end - 1:,}{order}."
        )


_TUPLES = ("layer_windows", "nope_layers", "unused_ids")
_FLAGS = ("tie_embeddings", "qkv_bias", "qk_norm", "mlp_bias", "out_bias")
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_positions",
)


def parameter_shapes(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, matrices first (they alone decay), then vectors; tied weights once."""
    hidden, heads_size = config.hidden_size, config.num_heads * config.head_dim
    matrices: list[tuple[str, tuple[int, ...]]] = [("embed", (config.vocab_size, hidden))]
    vectors: list[tuple[str, tuple[int, ...]]] = []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        matrices += [
            (prefix + "qkv", (config.qkv_size, hidden)),  # rows: queries, keys, values
            (prefix + "out", (hidden, heads_size)),
            (prefix + "gate_up", (2 * config.intermediate_size, hidden)),  # rows: gate, up
            (prefix + "down", (hidden, config.intermediate_size)),
        ]
        vectors += [(prefix + "attention_norm", (hidden,)), (prefix + "mlp_norm", (hidden,))]
        if config.qkv_bias:
            vectors.append((prefix + "qkv_bias", (config.qkv_size,)))
        if config.qk_norm:
            vectors += [(prefix + "q_norm", (config.head_dim,)), (prefix + "k_norm", (config.head_dim,))]
        if config.out_bias:
            vectors.append((prefix + "out_bias", (hidden,)))
        if config.mlp_bias:
            vectors += [(prefix + "gate_up_bias", (2 * config.intermediate_size,)), (prefix + "down_bias", (hidden,))]
    if not config.tie_embeddings:
        matrices.append(("head", (config.vocab_size, hidden)))
    vectors.append(("final_norm", (hidden,)))
    return matrices + vectors


def layout(config: ModelConfig) -> WeightLayout:
    """Where each tensor of `parameter_shapes` lies in a flat buffer: end to end, in that order, without gaps."""
    entries, offset = [], 0
    for name, shape in parameter_shapes(config):
        entries.append(Entry(name, shape, offset))
        offset += prod(shape)
    return WeightLayout(tuple(entries), offset)


def checkpoint_bytes(config: ModelConfig) -> int:
    """What the learner writes of a checkpoint: float32 weights, and Adam's two averages of each."""
    return 3 * layout(config).num_bytes("float32")


# `model="tiny"`: learns the built-in `guess` task from random weights on two cores; the task gives the vocabulary.
TINY = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_positions=1024,
)
