"""The tokenizer of a model directory, and the ids that its files say end a text."""

from pathlib import Path
from typing import Any

from pipeline.chat.json_files import read_json_object
from pipeline.chat.template import special_tokens
from pipeline.errors import ConfigError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(directory: Path) -> dict[str, Any]:
    """tokenizer.json as an object, with the added tokens that only tokenizer_config.json names. Raises ConfigError."""
    tokenizer = read_json_object(directory / "tokenizer.json")
    if not tokenizer:
        # Their files hold the same in a form of their own.
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / name).exists()]
        if not others:
            raise ConfigError(f"{directory} has no tokenizer.json. Fetch the model's tokenizer files.")
        raise ConfigError(
            f"{directory} has {others[0]}, but not tokenizer.json, which Headway reads. Make it with transformers: "
            f'AutoTokenizer.from_pretrained("{directory}").save_pretrained("{directory}").'
        )
    if not isinstance(tokenizer.get("model"), dict):
        raise ConfigError(f'{directory / "tokenizer.json"} has no "model". Fetch it again.')
    added = _added_tokens(tokenizer.get("added_tokens") or [], directory / "tokenizer.json")
    known = {token["content"] for token in added}
    path = directory / "tokenizer_config.json"
    decoder = read_json_object(path).get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(isinstance(token, dict) for token in decoder.values()):
        raise ConfigError(f'The "added_tokens_decoder" of {path} holds no tokens by id. Fetch it again.')
    ids_of_decoder = ((int(index) if index.isdecimal() else index, token) for index, token in decoder.items())
    for token in _added_tokens([{**token, "id": index} for index, token in ids_of_decoder], path):
        if token["content"] not in known:
            added.append(
                {key: token[key] for key in ("id", "content")} | {key: token.get(key, False) for key in _FLAGS}
            )
            known.add(token["content"])
    vocab = tokenizer["model"].get("vocab") or []
    entries = vocab if isinstance(vocab, list) else []
    if not isinstance(vocab, dict | list) or not all(isinstance(entry, list) and entry for entry in entries):
        raise ConfigError(f'The "vocab" of {directory / "tokenizer.json"} holds no tokens. Fetch it again.')
    ids = vocab if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(entries)}
    for name in special_tokens(directory).values():
        if name not in known and name in ids:
            flags = dict.fromkeys(_FLAGS, False) | {"special": True}
            added.append({"id": ids[name], "content": name} | flags)
            known.add(name)
    return tokenizer | {"added_tokens": sorted(added, key=lambda token: token["id"])}


def _added_tokens(tokens: Any, path: Path) -> list[dict[str, Any]]:
    """The added tokens of a file in the order of their ids. Raises ConfigError for what is none."""
    for token in tokens if isinstance(tokens, list) else [tokens]:
        if not isinstance(token, dict) or type(token.get("id")) is not int or not isinstance(token.get("content"), str):
            raise ConfigError(
                f"{path} has the added token {token!r:.100}, which has no id and content. Fetch it again."
            )
    return sorted(tokens, key=lambda token: token["id"])


def read_stop_ids(directory: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, or of config.json if there is none. ConfigError for what is no id."""
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        if any(type(index) is not int and index is not None for index in values):
            raise ConfigError(
                f"{directory / name}: eos_token_id is {value!r:.100}; it is a token's id or a list of ids. Correct it."
            )
        if found := [index for index in values if index is not None]:
            return found
    return []
