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


def why_not_plain(value: Any) -> str | None:
    """Why no message can carry `value`; None if one can."""
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None
