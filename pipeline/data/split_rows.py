"""What is held out of training: rows of one dataset chosen by their content, and those equal to rows given."""

import hashlib
from collections.abc import Sequence
from typing import Any

from pipeline.config_checks import is_finite_number
from pipeline.data.mixed_rows import MixedRows, keep_rows
from pipeline.dataset import check_rows
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.wording import shown


def split_rows(
    rows: Sequence[dict[str, Any]], holdout: int | float
) -> tuple[list[dict[str, Any]] | MixedRows, list[dict[str, Any]]]:
    """(rows to train, held-out rows), each in the order of `rows`; of a mix the first is a mix, too.

    holdout: how many, or (a float between 0 and 1) which share of them. They are those whose content has the smallest
    hashes, so the choice depends on no seed and no order, and stays nearly the same when rows are added. Rows of equal
    content stay together, which may hold out some more. Raises ConfigError, or ConfigTypeError for rows that are none.
    """
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise ConfigTypeError(f"rows is {type(rows).__name__}; give a list of dicts.")
    check_rows(rows)
    wanted = _wanted(holdout, len(rows))
    digests = [content_digest(row) for row in rows]
    limit = sorted(digests)[wanted - 1]
    held = [row for row, digest in zip(rows, digests, strict=True) if digest <= limit]
    if len(held) == len(rows):
        raise ConfigError(
            f"holdout is {shown(holdout)}, and of {len(rows)} rows so many are equal that none would be left to train; "
            "hold out fewer, or give more different rows."
        )
    chosen = set(map(id, held))
    return keep_rows(rows, lambda row: id(row) not in chosen), held


def _wanted(holdout: int | float, num_rows: int) -> int:
    if not is_finite_number(holdout):
        raise ConfigTypeError(f"holdout is {shown(holdout)}; give a number of rows, or a share of them below 1.")
    if isinstance(holdout, float):
        if not 0 < holdout < 1:
            raise ConfigError(
                f"holdout is {holdout:g}; as a share of the rows it lies between 0 and 1 (a number of rows is written "
                "without a point)."
            )
        wanted = max(1, round(holdout * num_rows))
    else:
        wanted = holdout
    if not 1 <= wanted < num_rows:
        raise ConfigError(
            f"holdout is {shown(holdout)}, but there are {num_rows} rows: at least one is held out, and at least one "
            "is left to train. Change the one or the other."
        )
    return wanted


def without_holdout(
    rows: Sequence[dict[str, Any]], holdout: Sequence[dict[str, Any]]
) -> list[dict[str, Any]] | MixedRows:
    """rows, in order, but those whose content equals that of a held-out row; of a mix a mix. Both must have passed
    `check_rows`. Raises ConfigError when a part of a mix has none left.
    """
    held = set(map(content_digest, holdout))
    return keep_rows(rows, lambda row: content_digest(row) not in held)


def content_digest(row: dict[str, Any]) -> bytes:
    """16 bytes, the same for rows of equal content and on every machine. Lists and tuples are equal to whoever gets the
    row, and so are 1 and 1.0; all NaNs are one.
    """
    return hashlib.blake2b(_canonical(row), digest_size=16).digest()


def _canonical(value: Any) -> bytes:
    """Bytes that are equal for equal content, and only for it: each value's length goes before it."""
    if isinstance(value, str):  # first, as most are: it runs for every value of a file
        kind, content = b"s", value.encode()
    elif isinstance(value, dict):
        kind, content = b"d", b"".join(sorted([_canonical(key) + _canonical(item) for key, item in value.items()]))
    elif isinstance(value, list | tuple):
        kind, content = b"l", b"".join(map(_canonical, value))
    elif value is None:
        kind, content = b"0", b""
    elif isinstance(value, int | float):  # also True, which equals 1
        kind, content = b"n", _number(value).encode()
    else:
        kind, content = b"b", bytes(value)
    return b"%b%d:%b" % (kind, len(content), content)


def _number(value: int | float) -> str:
    """One text for numbers that are equal: 1.0 is 1, and -0.0 is 0."""
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)
