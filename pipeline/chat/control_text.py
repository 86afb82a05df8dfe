"""Control tokens come from the template alone: text in messages that looks like one stays text.

Three steps, around the rendering of a template:
1. In each text of a message, every place that reads like a control token is broken by a mark (`TextBreaker`). So what
   still reads like one in the rendered text was written by the template.
2. That is replaced by names that no message can hold; then the marks go, and messages are as they were.
3. The whole is encoded in one go by a copy of the tokenizer whose control tokens have these names, under the same ids,
   and which does not know their texts.
A control token is any added token (`<|im_end|>`, `<think>`, `<tool_call>`, …) but white space and single characters:
these are text, and a character may have no other id.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from pipeline.errors import ConfigError, TemplateError

# The marks: two characters that hardly any text has (and that survive if one does), which are printed as they are, so
# that no template's formatting changes them, and which are neither letters nor space.
BREAK = "\ua874"  # goes away
QUOTE = "\ua875"  # with the six hexadecimal digits behind it, one character
MAX_REASON = 300  # characters of what the tokenizers' library says: it may repeat a whole vocabulary
_MARK = re.compile(f"[{BREAK}{QUOTE}]")
_QUOTED = re.compile(f"{BREAK}|{QUOTE}([0-9a-fA-F]{{6}})")


def restore(text: str) -> str:
    """Rendered text without marks: what the messages said."""
    return _QUOTED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "", text)


# In ASCII JSON: an escape, which an even number of backslashes comes before.
_ESCAPED = re.compile(rf"(?<!\\)((?:\\\\)*)\\u(?:{ord(BREAK):04x}|{ord(QUOTE):04x}([0-9a-f]{{6}}))")


def unescaped_marks(ascii_json: str) -> str:
    """JSON that has been written in ASCII, with its marks as they were."""

    def unescaped(found: re.Match) -> str:
        if found[2] is None:
            return found[1] + BREAK
        return f"{found[1]}\\u{int(found[2], 16):04x}"

    return _ESCAPED.sub(unescaped, ascii_json)


class TextBreaker:
    """Breaks what reads like one of `controls` in a text, also where its other half may come from what is beside it."""

    def __init__(self, controls: Iterable[str]) -> None:
        self._controls = sorted(set(controls))
        self._starts = _any_of(self._controls, ahead=True)
        self._longest = max(map(len, self._controls), default=0)
        self._beginnings = {text[:end] for text in self._controls for end in range(1, len(text))}
        self._ends = {text[start:] for text in self._controls for start in range(1, len(text))}

    def broken(self, text: str, whole: bool = False) -> str:
        """The text with its marks, itself if it needs none. whole: also if all of it may be the middle of a control."""
        breaks = {found.start() + 1 for found in self._starts.finditer(text)}
        breaks |= self._at_end(text) | self._at_start(text)
        inner = text.strip() if whole else ""
        if 0 < len(inner) < self._longest and any(inner in control for control in self._controls):
            breaks.add(text.index(inner))
        if not breaks:
            return _MARK.sub(_quote, text)
        parts, last = [], 0
        for place in sorted(breaks):
            parts.append(_MARK.sub(_quote, text[last:place]))
            last = place
        parts.append(_MARK.sub(_quote, text[last:]))
        return BREAK.join(parts)

    def all_broken(self, value: Any) -> Any:
        """A copy of a plain value with all texts in it broken, keys included."""
        if isinstance(value, str):
            return self.broken(value)
        if isinstance(value, Mapping):
            return {self.all_broken(key): self.all_broken(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.all_broken(item) for item in value]
        return value

    def _at_end(self, text: str) -> set[int]:
        """Where to break what the text ends with, if a control may begin there: also behind white space cut off."""
        places = set()
        for end in {len(text), len(text.rstrip())}:
            for start in range(max(0, end - self._longest + 1), end):
                if text[start:end] in self._beginnings:
                    places.add(start + 1)
        return places

    def _at_start(self, text: str) -> set[int]:
        places = set()
        for start in {0, len(text) - len(text.lstrip())}:
            for end in range(start + 1, min(len(text), start + self._longest - 1) + 1):
                if text[start:end] in self._ends:
                    places.add(end - 1)
        return places


class ControlText:
    """A tokenizer that tells the template's control tokens from text.

    tokenizer: a tokenizer.json as an object, all added tokens in it. place: the directory's name, for errors. `plain`
    is the tokenizer as it is, `literal` the copy to which text is only text, `controls` the id of each control token,
    `special` those that tokenizers mark as special.
    """

    def __init__(self, tokenizer: Mapping[str, Any], place: str) -> None:
        self._place = place
        tokenizer = {**tokenizer, "truncation": None, "padding": None}
        self.plain = _load(tokenizer, place)
        for token in tokenizer["added_tokens"]:
            if (found := self.plain.token_to_id(token["content"])) != token["id"]:
                raise ConfigError(
                    f"The token {token['content']!r} in tokenizer.json of {place} has the id {token['id']} there, but "
                    f"{found} when it is loaded. The model was trained with one of them. Correct its added_tokens."
                )
        added = [token["content"] for token in tokenizer["added_tokens"]]
        controls = [text for text in added if len(text) > 1 and not text.isspace()]
        self.controls: dict[str, int] = {text: self.plain.token_to_id(text) for text in controls}
        self.special = frozenset(token["content"] for token in tokenizer["added_tokens"] if token.get("special"))
        nonce = secrets.token_hex(8)
        self._names = {text: _name(text, nonce, index) for index, text in enumerate(self.controls)}
        self._written = _any_of(sorted(self.controls, key=len, reverse=True))
        self.literal = _load(_renamed(tokenizer, self._names), place)
        # Plain text gives the unknown token too, so it is not counted.
        self._counted = frozenset(self.controls.values()) - {_unknown_id(tokenizer["model"])}
        for text, name in self._names.items():
            if self.literal.token_to_id(name) != self.controls[text]:
                raise ConfigError(
                    f"The token {text!r} of {place} can't be told from text: under another name its id is "
                    f"{self.literal.token_to_id(name)}, not {self.controls[text]}. Check the ids of added_tokens in "
                    "tokenizer.json."
                )

    def find_all(self, rendered: str, start: int = 0) -> Iterator[re.Match]:
        """The control tokens in rendered text, from `start` on."""
        return self._written.finditer(rendered, start)

    def encode(self, rendered: str) -> list[int]:
        """The ids of rendered text, as the plain tokenizer encodes it, but no mark-broken text becomes a control token.

        Raises TemplateError if the tokenizer can't encode it.
        """
        num_written = 0

        def name(found: re.Match) -> str:
            nonlocal num_written
            num_written += self.controls[found[0]] in self._counted
            return self._names[found[0]]

        text = self._written.sub(name, rendered)
        try:
            ids = self.literal.encode(restore(text), add_special_tokens=False).ids
        except Exception as error:  # the tokenizer raises plain Exception
            raise TemplateError(f"The tokenizer of {self._place} can't encode a conversation: {error}.") from None
        if num_written != sum(index in self._counted for index in ids):
            raise TemplateError(
                f"The tokenizer of {self._place} does not find all control tokens that the chat template writes: "
                f"{num_written} are in the text. Set single_word and normalized to false for added_tokens in "
                "tokenizer.json."
            )
        return ids


def _quote(found: re.Match) -> str:
    return f"{QUOTE}{ord(found[0]):06x}"


def _any_of(texts: list[str], ahead: bool = False) -> re.Pattern:
    """Finds any of them, the first listed first; `ahead`: only its place, so that others may overlap it."""
    if not texts:
        return re.compile("(?!)")
    first = "".join(re.escape(char) for char in sorted({text[0] for text in texts}))
    pattern = f"(?=[{first}])(?:{'|'.join(map(re.escape, texts))})"  # the class lets most places be passed over fast
    return re.compile(f"(?={pattern})" if ahead else pattern)


def _name(text: str, nonce: str, index: int) -> str:
    """What to call a control token: of a kind that normalizers leave alone, and beside which words end as before."""
    before, after = ("n" if char.isalnum() or char == "_" else "<" for char in (text[0], text[-1]))
    return f"{before}{nonce}{index:06d}{'>' if after == '<' else after}"


def _renamed(tokenizer: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """tokenizer.json with other names for those tokens, and without merges that lead to or from them."""
    made = {key: value for key, value in tokenizer.items() if key != "model"}
    made["added_tokens"] = [
        {**token, "content": names.get(token["content"], token["content"])} for token in tokenizer["added_tokens"]
    ]
    made["post_processor"] = None  # it may name special tokens, and would add some: the template writes all there are
    model = dict(tokenizer["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if not (pair[0] in names or pair[1] in names or pair[0] + pair[1] in names)
        ]
    made["model"] = model
    return made


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    unknown, vocab = model.get("unk_token"), model.get("vocab")
    return vocab.get(unknown) if isinstance(vocab, dict) else model.get("unk_id")


def _load(tokenizer: Mapping[str, Any], place: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(tokenizer, ensure_ascii=False))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception, and what derives from none when Rust code of the library panics
        why = str(error)
        why = why if len(why) <= MAX_REASON else f"{why[:MAX_REASON]}..."
        raise ConfigError(f"The tokenizer.json of {place} can't be loaded: {why}. Fetch it again.") from None
