"""A data file before it is parsed: what may be opened, and its text."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.wording import suggestion

BYTE_ORDER_MARK = "\ufeff"  # which some editors put before a text; no part of it

# How files begin that hold no plain text, whatever they are called.
_OTHER_KINDS = (
    (b"\x1f\x8b", "gzip-compressed", "Unpack it (gunzip) and name the result."),
    (b"PK\x03\x04", "a zip archive", "Unpack it and name the file inside."),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "Unpack it (unzstd) and name the result."),
    (b"BZh", "bzip2-compressed", "Unpack it (bunzip2) and name the result."),
    (b"\xfd7zXZ", "xz-compressed", "Unpack it (unxz) and name the result."),
    (b"PAR1", "a Parquet file", "Give it the suffix .parquet."),
    (b"\xff\xfe", "UTF-16 text", "Save it as UTF-8."),
    (b"\xfe\xff", "UTF-16 text", "Save it as UTF-8."),
)


def check_file(path: Path) -> None:
    """Raise ConfigError unless `path` is a file with something in it that can be read."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist.{_near(path)} Name a data file.") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is no regular file; rows are read from files, so save them in one.")
    if found.st_size == 0:
        raise ConfigError(f"{path} is empty (0 bytes); give a file with at least one row.")


def _near(path: Path) -> str:
    try:
        return suggestion(path.name, os.listdir(path.parent))
    except OSError:
        return ""


def text_lines(path: Path) -> Iterator[bytes]:
    """The lines of a text file, which end with \\n alone: \\r, U+2028 and U+0085 are left to who parses them. A
    byte-order mark is kept. A file that grows is read as far as it goes now, or there would be no end. Raises
    ConfigError for what begins as no text does.
    """
    try:
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size
            for number, line in enumerate(file):
                if number == 0:
                    _refuse_other_kinds(path, line)
                yield line
                left -= len(line)
                if left <= 0:
                    return
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error


def read_text(path: Path) -> str:
    """The whole file, without a byte-order mark. Raises ConfigError, at bad UTF-8 with its line and byte."""
    lines = []
    for number, line in enumerate(text_lines(path), 1):
        try:
            lines.append(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: line {number} {not_utf8(error)}. Save the file as UTF-8.") from error
    return "".join(lines).removeprefix(BYTE_ORDER_MARK)


def not_utf8(error: UnicodeDecodeError) -> str:
    """What completes "line 3 …", for an error of that line's bytes."""
    return f"is not UTF-8: byte {error.start} of the line (counted from 0) is {error.object[error.start]:#04x}"


def _refuse_other_kinds(path: Path, line: bytes) -> None:
    for start, kind, advice in _OTHER_KINDS:
        if line.startswith(start):
            raise ConfigError(f"{path} is {kind}, not a plain text file. {advice}")
