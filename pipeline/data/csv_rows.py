"""Rows from CSV: a line of names, then one record a row; every value is text, as it stands in the file."""

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.data.bad_rows import BadRows
from pipeline.data.data_file import read_text
from pipeline.errors import ConfigError

LARGEST_FIELD = 2**31 - 1  # characters; the module's own limit is 131,072, which long documents pass


def read_csv(path: Path, bad: BadRows) -> Iterator[tuple[int, dict[str, str]]]:
    """(line from 1 where the record begins, row). Records may span lines inside quotes; blank lines hold none. Raises
    ConfigError for a header that names no fields, and where the quotes are wrong: behind that nothing can be read.
    """
    # newline="": lines end at \n, \r\n or \r, as the module has it, and never at U+2028.
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    names: list[str] | None = None
    line = 1
    while True:
        line = reader.line_num + 1
        try:
            with _long_fields():
                record = next(reader, None)
        except csv.Error as error:
            raise ConfigError(
                f"{path}: the record that begins in line {line} is not valid CSV: {error}. A field with a comma, a "
                'quote or a line end stands in quotes ("…"), and a quote in it is written twice: correct it.'
            ) from error
        if record is None:
            return
        if not record:
            continue
        if names is None:
            names = record
            _check_header(path, line, names)
        elif len(record) != len(names):
            bad.add(
                line,
                f"has {len(record)} fields, but the header names {len(names)}",
                "Give every record one value per name; a value with a comma in it stands in quotes.",
            )
        else:
            yield line, dict(zip(names, record, strict=True))


@contextmanager
def _long_fields() -> Iterator[None]:
    """The limit is the module's and not a reader's: it is set only while a record is read."""
    before = csv.field_size_limit(LARGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _check_header(path: Path, line: int, names: list[str]) -> None:
    known: set[str] = set()
    for index, name in enumerate(names):
        if not name.strip():
            raise ConfigError(
                f"{path}: the header (line {line}) has no name for field {index + 1} of {len(names)}; name every field."
            )
        if name in known:
            raise ConfigError(
                f"{path}: the header (line {line}) names {name!r:.80} twice; give each field its own name."
            )
        known.add(name)
    if len(names) == 1:
        for separator, kind in ((";", "semicolons"), ("\t", "tabs")):
            if separator in names[0]:
                raise ConfigError(
                    f"{path}: the header (line {line}) is {names[0]!r:.80}: its fields are parted by {kind}, but a "
                    ".csv file's are by commas. Save it with commas."
                )
