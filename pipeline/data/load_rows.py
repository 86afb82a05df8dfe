"""load_rows: dataset rows from a file, a saved dataset or a user's function, checked whole before any is used."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.data.arrow_rows import read_parquet, read_saved_dataset
from pipeline.data.bad_rows import BadRows
from pipeline.data.csv_rows import read_csv
from pipeline.data.data_file import check_file
from pipeline.data.json_rows import read_json, read_json_lines
from pipeline.data.row_fields import RowFields
from pipeline.dataset import MAX_DEPTH, unplain_field
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.probe import call_rows
from pipeline.wording import shown

Reader = Callable[[BadRows], Iterator[tuple[int | str, Any]]]  # (place, row) of each row; bad ones are told to BadRows


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file. unit: what a place in it is called; has_columns: all of its rows have the same fields."""

    name: str
    read: Callable[[Path, BadRows], Iterator[tuple[int | str, Any]]]
    unit: str
    has_columns: bool = False


_JSON_LINES = Format("JSON Lines", read_json_lines, "line")
FORMATS = {
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".json": Format("JSON", read_json, "row"),
    ".csv": Format("CSV", read_csv, "line", has_columns=True),
    ".parquet": Format("Parquet", read_parquet, "row", has_columns=True),
}

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz")
_OBJECT = 'A row is an object: {"field": value, …}.'
_PLAIN = (
    "Rows travel to other processes: whole numbers have at most 64 bits, text holds no lone surrogates, and nothing is "
    f"nested deeper than {MAX_DEPTH} levels."
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from: in words, how its places are called, and its reader."""

    name: str
    format: str
    unit: str
    has_columns: bool
    read: Reader


def load_rows(
    path: str | os.PathLike[str],
    *,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    id_field: str | None = None,
    allow_empty_prompts: bool = False,
) -> list[dict[str, Any]]:
    """The rows of a file of JSON Lines (.jsonl, .ndjson), JSON (.json, a list of objects), CSV or Parquet, of a
    directory that `datasets` saved (`directory#train` names a split), or of a function `module:callable`, which is
    called in another process.

    Fields that are named must be in every row: the prompt is text or a list of messages, not empty unless
    allow_empty_prompts; the answer may have any value; ids are text or whole numbers, each once, and are copied to the
    row's "id". Values stay as they are written. Raises ConfigError that names the file and the first ten bad lines with
    what is wrong there, ConfigTypeError for arguments of a wrong type, and RunError when a function does not end.
    """
    fields = RowFields(prompt_field, answer_field, id_field, allow_empty_prompts)
    source = open_source(path)
    bad = BadRows(source.name, source.unit)
    rows: list[dict[str, Any]] = []
    for place, row in source.read(bad):
        if not isinstance(row, dict):
            bad.add(place, f"is {shown(row)}, not an object", _OBJECT)
            continue
        if not rows and source.has_columns:
            fields.check_columns(source.name, row)
        found = unplain_field(row)
        if found is not None:
            bad.add(place, f"has {found[0]} ({found[1]})", _PLAIN)
        fields.check(place, row, bad)
        rows.append(row)
    bad.refuse()
    if not rows:
        raise ConfigError(f"{source.name} has no rows; give at least one.")
    return rows


def _call(path: str, bad: BadRows) -> Iterator[tuple[int, Any]]:
    yield from enumerate(call_rows(path))


def open_source(path: str | os.PathLike[str]) -> Source:
    """What `path` names. Raises ConfigError when it is nothing that rows come from."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigTypeError(f"path is {shown(path)}; name a data file, a directory or module:callable.")
    name = os.fspath(path)
    file, split = Path(name), None
    if not os.path.exists(file):  # and not Path.exists, which raises for names that are too long
        module, _, function = name.rpartition(":")
        if module and all(part.isidentifier() for part in function.split(".")):
            return Source(name, "function", "row", False, partial(_call, name))
        before, mark, after = name.rpartition("#")
        if mark and os.path.exists(before):
            file, split = Path(before), after
    if os.path.isdir(file):
        return Source(name, "saved dataset", "row", True, partial(read_saved_dataset, file, split))
    if split is not None:
        raise ConfigError(f"{name}: a file has no splits (directories that `datasets` saved do); leave #{split} out.")
    suffix = file.suffix.lower()
    if suffix not in FORMATS:
        check_file(file)
        if suffix in _COMPRESSED:
            raise ConfigError(f"{file} is compressed ({suffix}); unpack it and name the result.")
        raise ConfigError(
            f"{file} has {f'the suffix {file.suffix!r}' if suffix else 'no suffix'}, which tells no format; rows are "
            f"read from {', '.join(FORMATS)} and from directories that `datasets` saved."
        )
    check_file(file)
    kind = FORMATS[suffix]
    return Source(name, kind.name, kind.unit, kind.has_columns, partial(kind.read, file))
