"""A llama GGUF file as a Hugging Face model directory: weights in float32, config, tokenizer and chat template.

GGUF (llama.cpp) keeps quantised weights, the rows of q and k in another order, and the tokenizer as metadata. Needs the
package `gguf` (extra `hf`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.errors import BenchError

CONTROL = 3  # tokenizer.ggml.token_type of control tokens

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufModel:
    """An opened GGUF file of a llama model. Raises BenchError, naming the file, for any other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:  # what its reader raises for other files
            raise BenchError(f"{path} is no whole GGUF file ({error}); get it again.") from None
        for key, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
            if self._field(key) != wanted:
                raise BenchError(f"{path} has {self._field(key)!r} as {key}; only {wanted!r} can be turned.")

    def write(self, directory: Path) -> None:
        """All files of a model directory, into an existing empty one."""
        tensors = self._weights()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "model.safetensors").chmod(0o644)  # it makes files for its user alone
        self._tokenizer().save(str(directory / "tokenizer.json"))
        for name, content in (
            ("config.json", self._config(tied="lm_head.weight" not in tensors)),
            ("generation_config.json", self._ids()),
            ("tokenizer_config.json", self._tokenizer_config()),
        ):
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise BenchError(f"{self._path} has no field {key}; it is not the file this was made for.")
        return field.contents()

    def _weights(self) -> dict[str, np.ndarray]:
        """Hugging Face's tensors by name, float32, a matrix as [out, in]."""
        heads = {
            "attn_q": self._field("llama.attention.head_count"),
            "attn_k": self._field("llama.attention.head_count_kv"),
        }
        tensors = {}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            part, _, name = tensor.name.removesuffix(".weight").rpartition(".")
            if part in heads or name in heads:
                values = rows_as_rotated_halves(values, heads[name])
            tensors[self._hf_name(tensor.name)] = np.ascontiguousarray(values)
        return tensors

    def _hf_name(self, name: str) -> str:
        stem = name.removesuffix(".weight")
        if stem in _TENSORS:
            return f"{_TENSORS[stem]}.weight"
        block, layer, part = (*stem.split("."), "", "")[:3]
        if block != "blk" or part not in _LAYER_TENSORS or not name.endswith(".weight"):
            raise BenchError(f"{self._path} holds the tensor {name}, which a llama model has not.")
        return f"model.layers.{int(layer)}.{_LAYER_TENSORS[part]}.weight"

    def _config(self, tied: bool) -> dict[str, Any]:
        heads = self._field("llama.attention.head_count")
        hidden = self._field("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "max_position_embeddings": self._field("llama.context_length"),
            "rope_theta": float(self._field("llama.rope.freq_base")),
            # float32 there: its shortest decimal is what the model was made with.
            "rms_norm_eps": float(str(np.float32(self._field("llama.attention.layer_norm_rms_epsilon")))),
            "vocab_size": self._field("llama.vocab_size"),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
        } | self._ids()

    def _ids(self) -> dict[str, int]:
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        return {key: self._field(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}

    def _tokenizer(self) -> Tokenizer:
        """A byte-level BPE in which each digit is a piece of its own, as SmolLM's."""
        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(tokens[index], normalized=False, special=True) for index in self._control_ids()]
        )
        return tokenizer

    def _control_ids(self) -> list[int]:
        return [index for index, kind in enumerate(self._field("tokenizer.ggml.token_type")) if kind == CONTROL]

    def _tokenizer_config(self) -> dict[str, Any]:
        tokens, ids = self._field("tokenizer.ggml.tokens"), self._ids()
        return {
            # Not GPT2Tokenizer, which SmolLM2 names: transformers 5 makes that one's pieces anew, digits together.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[self._field("tokenizer.ggml.unknown_token_id")],
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._field("llama.context_length"),
            "chat_template": self._field("tokenizer.chat_template"),
        }


def rows_as_rotated_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads · D, in] with each head's rows in llama.cpp's order (the two that RoPE turns together side by side) to
    Hugging Face's (the first of all pairs, then the second).
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
