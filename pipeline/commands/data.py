"""`headway data FILE…`: checks data files as a run would, and tells what their rows hold; no worker is started."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.commands.arguments import read_arguments
from pipeline.data.load_rows import load_rows, open_source
from pipeline.data.split_rows import content_digest
from pipeline.dataset import row_id
from pipeline.errors import ConfigError, RunError

DATA_HELP = """Usage: headway data FILE… [--OPTION VALUE …]

Checks files of rows whole, as a run does before it starts, and tells what they hold. A FILE is JSON Lines (.jsonl,
.ndjson), JSON (.json, a list of objects), CSV (.csv, a line of names first), Parquet (.parquet), a directory that
`datasets` saved (DIR#SPLIT names a split), or a function module:callable that gives rows.

  --prompt-field NAME        must be in every row: text or a list of messages, not empty
  --answer-field NAME        must be in every row, of any value
  --id-field NAME            must be in every row: text or a whole number, each once; becomes the row's "id"
  --allow-empty-prompts      prompts may be empty"""

_FLAG = "allow_empty_prompts"
_OPTIONS = ("prompt_field", "answer_field", "id_field", _FLAG)
_KINDS: dict[type | tuple[type, ...], str] = {  # bool goes before int, which it is too
    str: "text",
    bool: "true/false",
    int: "whole number",
    float: "number",
    type(None): "null",
    dict: "object",
    (list, tuple): "list",
    bytes: "bytes",
}


def check_data(arguments: Sequence[str]) -> int:
    """Prints what each file holds; 2 if one can't be used (which each then says on stderr), else 0. Raises ConfigError
    for bad options.
    """
    words = list(arguments)
    first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    files, given = words[:first], read_arguments(words[first:], _OPTIONS, {}, (_FLAG,))
    if not files:
        raise ConfigError("headway data needs a file of rows: headway data FILE… [--OPTION VALUE …].")
    options: dict[str, Any] = {name: one.value for name, one in given.items()}
    if _FLAG in options:
        if options[_FLAG] not in ("true", "false"):
            raise ConfigError(
                f"--allow-empty-prompts is {options[_FLAG]!r}; write true or false, or nothing behind it."
            )
        options[_FLAG] = options[_FLAG] == "true"
    code = 0
    for file in files:
        try:
            told = describe(load_rows(file, **options), file)
        except (ConfigError, RunError) as error:  # of this file: the others are told of all the same
            print(f"headway: {_as_typed(' '.join(str(error).split()))}", file=sys.stderr)
            code = 2
        else:
            print(told)
    return code


def describe(rows: Sequence[dict[str, Any]], path: str) -> str:
    """A line for the file, and one for each field."""
    lines = [f"{path}: {_count(len(rows), 'row')} ({open_source(path).format})"]
    fields: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            fields.setdefault(name, []).append(value)
    names = [_printable(name) for name in fields]
    width = max(map(len, names), default=0)
    for name, values in zip(names, fields.values(), strict=True):
        lines.append(f"  {name:{width}}  {_kinds(values)}{_missing(len(rows) - len(values))}")
    ids = [found for row in rows if (found := row_id(row)) is not None]
    if len(set(ids)) < len(ids):
        lines.append(f"  {_count(len(ids) - len(set(ids)), 'row')} with the id of an earlier one")
    repeated = len(rows) - len({content_digest(row) for row in rows})
    if repeated:
        lines.append(f"  {_count(repeated, 'row')} equal to an earlier one")
    return "\n".join(lines)


def _kinds(values: Sequence[Any]) -> str:
    """What kinds of values there are, each with its number unless it is the only one, and how long texts and lists
    are.
    """
    kinds = Counter(map(_kind, values))
    told = []
    for kind, count in kinds.most_common():
        number = "" if len(kinds) == 1 else f" {count:,}"
        told.append(f"{kind}{number}{_lengths(kind, values)}")
    return ", ".join(told)


def _kind(value: Any) -> str:
    return next((kind for cls, kind in _KINDS.items() if isinstance(value, cls)), type(value).__name__)


def _lengths(kind: str, values: Sequence[Any]) -> str:
    cls, unit = {"text": (str, "character"), "list": ((list, tuple), "item")}.get(kind, (None, ""))
    if cls is None:
        return ""
    lengths = [len(value) for value in values if isinstance(value, cls)]
    least, most = min(lengths), max(lengths)
    return f" ({'' if least == most else f'{least:,} to '}{_count(most, unit)})"


def _missing(count: int) -> str:
    return f"; not in {_count(count, 'row')}" if count else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _printable(name: Any) -> str:
    """A field's name, with escapes for what would move the cursor or colour a terminal."""
    return name if isinstance(name, str) and name.isprintable() and name else repr(name)


def _as_typed(message: str) -> str:
    """Options as the command line has them."""
    return re.sub(rf"\b({'|'.join(_OPTIONS)})\b", lambda found: "--" + found[0].replace("_", "-"), message)
