"""Dataset rows: dicts of plain values, because each travels to an environment process."""

from collections.abc import Sequence
from typing import Any

import msgpack

from pipeline.errors import ConfigTypeError


def check_rows(rows: Sequence[Any], what: str = "Row") -> None:
    """Raise ConfigTypeError, naming the row and its field, unless every row is a dict that a message can carry."""
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigTypeError(f"{what} {index} is {row!r:.80}; every row is a dict of plain values.")
        if why_not_plain(row) is None:
            continue
        for field, value in row.items():
            why = why_not_plain({field: value})
            if why is not None:
                raise ConfigTypeError(
                    f"{what} {index} has {value!r:.80} as its {field!r}; a row travels to another process, so it holds "
                    f"plain values only (numbers, text, lists, dicts): {why}."
                )


def without_holdout(rows: Sequence[dict[str, Any]], holdout: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """rows, in order, but those whose content equals that of a held-out row. Both must have passed `check_rows`."""
    held_out = {_content(row) for row in holdout}
    return [row for row in rows if _content(row) not in held_out]


def _content(value: Any) -> Any:
    """A hashable stand-in, equal for equal content: lists and tuples are the same to whoever gets the row, and so are
    1 and 1.0; all NaNs are one.
    """
    if isinstance(value, dict):
        return "dict", frozenset((key, _content(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(_content(item) for item in value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return ("NaN",) if value != value else value


def why_not_plain(value: Any) -> str | None:
    """Why no message can carry `value`; None if one can."""
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None
