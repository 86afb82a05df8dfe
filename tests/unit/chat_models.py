"""Model directories with a tokenizer and a chat template but no weights, in the manner of several families."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pipeline.chat.format import ModelTurn

DATA = Path(__file__).parent.parent / "data"
CASES = DATA / "cases"
TEMPLATES = DATA / "templates"
CORPUS = (
    "system user assistant the and for each call answer with a JSON object within tags name arguments function",
    "What is twelve plus thirty? Use the add tool. The answer is 42. hello again think Oslo",
    '{"name": "add", "arguments": {"a": 1, "b": 2}} {"type": "function", "parameters": "result"}',
)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
# template -> (special tokens, other added tokens, bos_token, eos_token)
FAMILIES = {
    "smollm2": (CHATML, (), "<|im_start|>", "<|im_end|>"),
    "qwen2_5": (CHATML, MARKUP[:2], None, "<|im_end|>"),
    "qwen3": (CHATML, MARKUP, None, "<|im_end|>"),
    "llama3_1": (LLAMA, (), "<|begin_of_text|>", "<|eot_id|>"),
    "mistral": (MISTRAL, (), "<s>", "</s>"),
    "smollm3": (CHATML, MARKUP, None, "<|im_end|>"),
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers, é < 3.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def trained(kind="bytes"):
    """A small tokenizer that can write any text. kind: bytes, or metaspace or prepend as sentencepiece's became."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind != "bytes", unk_token=None if kind == "bytes" else "<unk>"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:
        if kind == "prepend":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind != "bytes":
        # The trainer marks the byte pieces as special; they are ordinary ones.
        fields = json.loads(tokenizer.to_str())
        fields["added_tokens"] = [token for token in fields["added_tokens"] if not token["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(fields))
    return tokenizer


def write_chat_model(directory, family="qwen2_5", kind="bytes", template=None, **config):
    """Write the files into an existing directory and return it. config: more keys of tokenizer_config.json."""
    special, other, bos, eos = FAMILIES[family]
    tokenizer = trained(kind)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in other])
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    text = (TEMPLATES / f"{family}.jinja").read_text() if template is None else template
    (directory / "chat_template.jinja").write_text(text)
    return directory


def turn_of(chat, ids):
    """The turn as a trajectory loop would give it, its calls numbered from 1."""
    text, calls = chat.parse_turn(ids)
    return ModelTurn(ids, text, [call | {"id": f"call{index:05d}"} for index, call in enumerate(calls, start=1)])


def sampled(chat, text):
    """Ids of a turn with this text, control tokens and all."""
    return chat._text.plain.encode(text, add_special_tokens=False).ids
