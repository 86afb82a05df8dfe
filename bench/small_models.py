"""Random model directories in Hugging Face's form, small enough for tests and the soak: made without transformers.

The tokenizer is a byte-level BPE like those of real models, with ChatML's special tokens; the chat template renders
tools and calls in Hermes form. The model has some more ids than the tokenizer, as padded checkpoints do.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from workers.model_config import ModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_MERGED = 40  # ids beside the 256 bytes: pieces such as " the", so that one text has several encodings
NUM_PADDED = 13  # ids of the model that the tokenizer lacks

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "smollm3": {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "no_rope_layers": [1, 0]},
}

# What directories of `write_small_model` hold, as our own configuration; families add biases or norms to it.
SMALL = ModelConfig(
    vocab_size=312,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
)

# After Qwen2.5's: a tool-less conversation without system message is rendered without one.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, answer with a JSON object within tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_CORPUS = (
    "system user assistant the and for each call answer with a JSON object within tags name arguments function",
    "What is twelve plus thirty? Use the calculator tool. The answer is 42.",
    '{"name": "calculator", "arguments": {"expression": "12 + 30"}}',
)


def write_small_model(
    directory: Path | str,
    *,
    family: str = "llama",
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tie: bool = True,
    corpus: Iterable[str] | None = None,
    num_merged: int = NUM_MERGED,
    **config: Any,
) -> Path:
    """Make `directory` (new or empty) a model of `family` with random weights; returns its path.

    shards: files to spread the tensors over; more than one brings an index. config: keys of config.json in place of the
    small ones here (`num_hidden_layers=3`, `rope_scaling={…}`, …). corpus, num_merged: texts that the tokenizer learns
    so many pieces from; with the few of its own, it takes nearly a token per character.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(directory, _CORPUS if corpus is None else corpus, num_merged)
    values = small_config(family, ids, tie=tie, dtype=dtype) | config
    write_json(directory / "config.json", values)
    generation = {
        "bos_token_id": None,
        "eos_token_id": [ids[IM_END], ids[ENDOFTEXT]],
        "pad_token_id": ids[ENDOFTEXT],
    }
    write_json(directory / "generation_config.json", generation)
    write_tensors(directory, random_tensors(values, seed, getattr(torch, dtype)), shards)
    return directory


def small_config(family: str, ids: dict[str, int], *, tie: bool, dtype: str) -> dict[str, Any]:
    """config.json as most checkpoints have it. ids: of every token, by text."""
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": len(ids) + NUM_PADDED,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": ids[IM_END],
        "pad_token_id": ids[ENDOFTEXT],
        "torch_dtype": dtype,
    } | _FAMILY_CONFIG[family]


def random_tensors(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors that a checkpoint of `config` holds, by Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values  # near 1, as trained norms are, but each its own
        elif name.endswith("bias"):
            values = 0.1 * values
        elif name != "model.embed_tokens.weight" or config["tie_word_embeddings"]:
            values = values / shape[-1] ** 0.5  # a tied head with longer rows would just repeat each token
        tensors[name] = values.to(dtype)
    return tensors


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """As the modelling code of each family registers its parameters; `lm_head.weight` only when it is untied."""
    hidden, mlp, family = config["hidden_size"], config["intermediate_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    out_bias = family != "qwen2" and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[name + ".weight"] = (outputs, inputs)
        if bias:
            shapes[name + ".bias"] = (outputs,)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linear(prefix + "self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
        linear(prefix + "self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(prefix + "self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(prefix + "self_attn.o_proj", hidden, heads * head_dim, out_bias)
        if family == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        linear(prefix + "mlp.gate_proj", mlp, hidden, mlp_bias)
        linear(prefix + "mlp.up_proj", mlp, hidden, mlp_bias)
        linear(prefix + "mlp.down_proj", hidden, mlp, mlp_bias)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_tensors(directory: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """model.safetensors, or so many shards with their index; tensors go to the shards in turn."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        own = dict(list(tensors.items())[shard::shards])
        save_file(own, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_tokenizer(directory: Path, corpus: Iterable[str], num_merged: int) -> dict[str, int]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; returns the id of each token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merged, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    specials = [AddedToken(text, special=True, normalized=False) for text in (ENDOFTEXT, IM_START, IM_END)]
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(ids[token.content]): {"content": token.content} | flags for token in specials},
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    write_json(directory / "tokenizer_config.json", values)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return ids


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
