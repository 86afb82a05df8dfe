"""The JSON of one tool call, read strictly: it is one plain call, or a `CallError` that says what is wrong with it.

Nothing is guessed: no missing brackets are filled in, no duplicate key wins, no number is rounded to infinity, nothing
is evaluated. What comes out can be sent in a message (`workers/messages.py`) as it is.
"""

import json
import re
from typing import Any

MAX_DEPTH = 64  # lists and objects within each other; messages carry 511, and no tool needs more than a few
MAX_NAME_CHARS = 128
MAX_INTEGER_DIGITS = 19
_LARGEST = 2**63 - 1  # what a message carries in both directions
_SPACE = re.compile(r"[ \t\r\n]*")
_IGNORED_KEYS = ("id", "type")  # of the call itself; they say nothing to the tool


class CallError(ValueError):
    """Why a call can't be run, as half a sentence for the model. `name` is the tool's, if that could be read."""

    def __init__(self, what: str, name: str = "") -> None:
        super().__init__(what)
        self.name = name


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= MAX_INTEGER_DIGITS + 1 else _LARGEST + 1  # long ones take quadratic time
    if abs(value) > _LARGEST:
        raise CallError(f"the number {digits[:12]}… has more than {MAX_INTEGER_DIGITS} digits or is beyond 64 bits")
    return value


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise CallError(f"the number {digits[:20]} is too large")
    return value


def _no_constant(name: str) -> None:
    raise CallError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CallError(f"the key {short(twice)} stands twice in one object")
    return found


# Not strict: a line break within a string has one plain reading, and models write code that way.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_no_constant, strict=False
)


def short(value: Any) -> str:
    """`value` for a sentence: its start, in characters that any message can carry."""
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def skip_space(text: str, position: int) -> int:
    """Where the white space that begins at `position` ends."""
    return _SPACE.match(text, position).end()


def scan_value(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins at `position`, white space aside, and where it ends. Raises CallError.

    Ends of tags within its strings are part of it: the JSON says where it ends, not a search for what may follow.
    """
    start = skip_space(text, position)
    try:
        value, end = _DECODER.raw_decode(text, start)
        _check(value)
    except RecursionError:
        raise CallError(f"it nests lists and objects more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        where = "at its start" if error.pos == start else f"at character {error.pos - start} of it"
        raise CallError(f"its JSON is wrong {where} ({error.msg})") from None
    return value, end


def _check(value: Any) -> None:
    """Raise CallError for what no message can carry: halves of a surrogate pair, or too deep a nesting."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        following = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, list):
                following.extend(item)
            elif isinstance(item, dict):
                following.extend(item)
                following.extend(item.values())
        if not following:
            return
        level = following
    raise CallError(f"it nests lists and objects more than {MAX_DEPTH} deep")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CallError("a text in it holds half of a surrogate pair, which is no character") from None


def read_call_arguments(value: Any, name: str) -> dict[str, Any]:
    """The arguments of a call: an object, or JSON text of one, decoded once. Raises CallError."""
    if isinstance(value, str):
        try:
            decoded, end = scan_value(value, 0)
        except CallError as error:
            raise CallError(f"its arguments are a text that can't be read as an object: {error}", name) from None
        if skip_space(value, end) < len(value) or not isinstance(decoded, dict):
            raise CallError(f"its arguments are the text {short(value)}, not an object", name)
        return decoded
    if not isinstance(value, dict):
        raise CallError(f"its arguments are {short(value)}, not an object", name)
    return value


def check_name(name: Any) -> str:
    """The tool's name, any text of a sensible length. Raises CallError."""
    if not isinstance(name, str) or not name.strip():
        raise CallError(f"its name is {short(name)}, not the name of a tool")
    if len(name) > MAX_NAME_CHARS:
        raise CallError(f"its name {short(name)} is longer than {MAX_NAME_CHARS} characters")
    _check_text(name)  # it needn't come from JSON: Mistral writes it as plain text
    return name


def read_call(value: Any) -> dict[str, Any]:
    """`{"name", "arguments", "error": None}` of one decoded call. `parameters`, as Llama 3 has it, stands for
    `arguments`; `id` and `type` are passed over. Raises CallError.
    """
    if not isinstance(value, dict):
        raise CallError(f"it is {short(value)}, not an object")
    if "name" not in value:
        raise CallError("it has no name")
    name = check_name(value["name"])
    keys = [key for key in ("arguments", "parameters") if key in value]
    if len(keys) != 1:
        raise CallError("it has both arguments and parameters" if keys else "it has no arguments", name)
    if unknown := [key for key in value if key not in ("name", *keys, *_IGNORED_KEYS)]:
        raise CallError(f"it has the key {short(unknown[0])} beside its name and arguments", name)
    return {"name": name, "arguments": read_call_arguments(value[keys[0]], name), "error": None}
