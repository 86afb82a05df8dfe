"""A random model of Hugging Face transformers, and the same weights in our buffer. Import it where that library is."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from workers.model_config import ModelConfig, layout
from workers.model_files.config import parse_model_config
from workers.model_files.tensor_names import hf_places

logging.set_verbosity_error()
SMALL = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}


class HFTwin:
    """`model`: theirs; `config`, `flat` [num_elements] of its dtype: ours, read from the config.json it would save."""

    def __init__(self, model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **keys: Any) -> None:
        config = AutoConfig.for_model(model_type, **(SMALL | keys))
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                values = torch.randn(parameter.shape, generator=generator)
                if "norm" in name:
                    values = 1.0 + 0.2 * values
                elif name.endswith("bias"):
                    values = 0.3 * values
                elif "embed_tokens" not in name:
                    values = values / parameter.shape[-1] ** 0.5
                parameter.copy_(values)
        self.config: ModelConfig = parse_model_config(json.loads(config.to_json_string()))
        self.flat = torch.full((layout(self.config).num_elements,), float("nan"), dtype=dtype)
        named = dict(self.model.named_parameters())
        for name, place in hf_places(self.config).items():
            tensor = named.pop(name).detach()
            assert tensor.shape == place.shape, name
            self.flat[place.offset : place.offset + place.num_elements] = tensor.flatten()
        assert not named, f"their tensors that we have none of: {sorted(named)}"

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] of one sequence, in one pass without a cache."""
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
