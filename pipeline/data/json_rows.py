"""Rows from JSON Lines (one object a line) and from JSON (one list of objects), with every value exactly as written.

Stricter than Python's own reader where that would change a value in silence: a field given twice, numbers that no float
holds, NaN and Infinity, which JSON does not have.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.data.bad_rows import BadRows
from pipeline.data.data_file import BYTE_ORDER_MARK, not_utf8, read_text, text_lines
from pipeline.errors import ConfigError

_CORRECT = "Correct what is written there."
_UTF8 = "Save the file as UTF-8."
_WHITE_SPACE = " \t\r\n"  # JSON's own; what else looks blank is text
_GAP = re.compile(f"[{_WHITE_SPACE}]*")


class _Wrong(Exception):
    """What completes "line 3 …"; at: the character where it was found, from 0, if it is known."""

    def __init__(self, what: str, at: int | None = None) -> None:
        super().__init__(what)
        self.at = at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in made if names.count(name) > 1)
        raise _Wrong(f"has the field {twice!r:.80} twice")
    return made


def _constant(text: str) -> Any:
    raise _Wrong(f"holds {text}, which is no JSON (write null, or a number)")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Wrong(f"holds {text:.40}, which is beyond every float (write it as text)")
    return number


# Made once: json.loads with hooks makes a decoder per call.
_decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float).raw_decode


def _parse(text: str, start: int) -> tuple[Any, int]:
    """(value, where its text ends). Raises _Wrong."""
    try:
        return _decode(text, start)
    except json.JSONDecodeError as error:
        raise _Wrong(f"is not valid JSON: {error.msg}, character {error.colno}", error.pos) from error
    except RecursionError as error:
        raise _Wrong("is nested too deep") from error
    except ValueError as error:  # Python reads no whole number of more than 4300 digits
        raise _Wrong("holds a number of thousands of digits (write it as text)") from error


def read_json_lines(path: Path, bad: BadRows) -> Iterator[tuple[int, Any]]:
    """(line from 1, value) of each line that can be read; the others are told to `bad`. Blank lines count, and hold no
    row. Raises ConfigError for what is no text file.
    """
    line = b""
    for number, line in enumerate(text_lines(path), 1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            bad.add(number, not_utf8(error), _UTF8)
            continue
        text = text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text
        text = text.rstrip(_WHITE_SPACE)
        if not text:
            continue
        try:
            value, end = _parse(text, _skip(text, 0))
            if end < len(text):
                at = _skip(text, end) + 1
                raise _Wrong(f"goes on after its first value, at character {at}; a line holds one object")
        except _Wrong as wrong:
            bad.add(number, str(wrong), _advice(text, number, torn=not line.endswith(b"\n")))
            continue
        yield number, value


def _advice(text: str, number: int, *, torn: bool) -> str:
    if text.startswith(BYTE_ORDER_MARK):
        return "A byte-order mark (U+FEFF) stands within the file, as when files are joined: remove it."
    if number == 1 and text.startswith("["):
        return "If the file is one JSON list, give it the suffix .json."
    if torn and number > 1:
        return "The last line has no end, as when a copy was cut short: write the file again."
    return _CORRECT


def read_json(path: Path, bad: BadRows) -> Iterator[tuple[str, Any]]:
    """("row (line)", value) of each element of the list that the file is; rows count from 0, lines from 1. Raises
    ConfigError for text that is no such list: behind a mistake nothing can be read.
    """
    text = read_text(path)
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        raise ConfigError(f"{path} {_not_a_list(text, at)}; a .json file of rows is one list of objects.")
    row, line, counted = 0, 1, 0
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        if row > 0:
            if text[at : at + 1] != ",":
                raise _syntax(path, text, at, "a comma or ] was expected")
            at = _skip(text, at + 1)
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = _parse(text, at)
        except _Wrong as wrong:
            where = line if wrong.at is None else 1 + text.count("\n", 0, wrong.at)
            raise ConfigError(f"{path}: line {where} {wrong}. {_CORRECT}") from wrong
        yield f"{row} (line {line})", value
        at = _skip(text, at)
        row += 1
    end = _skip(text, at + 1)
    if end < len(text):
        raise _syntax(path, text, end, "nothing may follow the list")


def _skip(text: str, at: int) -> int:
    """Where the white space that begins at `at` ends."""
    return _GAP.match(text, at).end()


def _syntax(path: Path, text: str, at: int, why: str) -> ConfigError:
    line, character = 1 + text.count("\n", 0, at), at - text.rfind("\n", 0, at)
    found = f"{text[at]!r}" if at < len(text) else "the end of the file"
    return ConfigError(
        f"{path}: line {line} is not valid JSON: {why}, not {found} at character {character}. {_CORRECT}"
    )


def _not_a_list(text: str, at: int) -> str:
    """What completes "FILE …"."""
    try:
        value, end = _parse(text, at)
    except _Wrong as wrong:
        where = 1 + text.count("\n", 0, wrong.at or at)
        return f"holds no list, and its line {where} {wrong}"
    if isinstance(value, dict) and text[_skip(text, end) :]:
        return "holds one object after the other, which is JSON Lines: give it the suffix .jsonl"
    lists = [name for name, part in value.items() if isinstance(part, list)] if isinstance(value, dict) else []
    if lists:
        return f"is an object whose field {lists[0]!r:.80} is a list: save that list alone"
    return f"holds {'an object' if isinstance(value, dict) else repr(value)[:40]}"
