"""Dataset rows: dicts of plain values, because each travels to an environment process."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgpack

from pipeline.errors import ConfigTypeError
from pipeline.wording import shown

ENVIRONMENT_KEY = "environment"  # of a row of a mix: the name of the environment that it is for

_NESTING = (dict, list, tuple)
MAX_DEPTH = 100  # levels of lists and dicts in a value: whoever walks one by recursion stays far from Python's limit


def check_rows(rows: Sequence[Any], what: str = "Row") -> None:
    """Raise ConfigTypeError, naming the row and its field, unless every row is a dict that a message can carry."""
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigTypeError(f"{what} {index} is {shown(row)}; every row is a dict of plain values.")
        found = unplain_field(row)
        if found is not None:
            what_it_has, why = found
            raise ConfigTypeError(
                f"{what} {index} has {what_it_has}; a row travels to another process, so it holds plain values only "
                f"(numbers, text, lists, dicts): {why}."
            )


def unplain_field(row: dict[str, Any]) -> tuple[str, str] | None:
    """The first field that no message can carry, as it completes "the row has …", and why; None if there is none."""
    if why_not_plain(row) is None:
        return None
    for field, value in row.items():
        if _deeper([value], MAX_DEPTH):
            return f"a value nested too deep as its {shown(field)}", f"at most {MAX_DEPTH} levels"
        why = why_not_plain({field: value})
        if why is not None:
            return f"{shown(value)} as its {shown(field)}", why
    raise AssertionError("no message can carry the row, but one can carry each of its fields")


def rows_digest(rows: Sequence[dict[str, Any]]) -> str:
    """Of the rows' contents, in order."""
    found = hashlib.sha256()
    for row in rows:
        found.update(msgpack.packb(row))
    return f"sha256:{found.hexdigest()}"


def row_id(row: dict[str, Any]) -> str | int | None:
    """Its "id", if it has one that is text or a whole number: how logs name the row beside its index."""
    found = row.get("id")
    return found if isinstance(found, str | int) and not isinstance(found, bool) else None


def _deeper(value: dict | list | tuple, levels: int) -> bool:
    """Whether lists and dicts are nested to more than `levels`, it included."""
    if levels == 0:
        return True
    # A loop and not any(...): it runs for every row of a file.
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _NESTING) and _deeper(item, levels - 1):
            return True
    return False


def why_not_plain(value: Any) -> str | None:
    """Why no message can carry `value`; None if one can."""
    try:
        packed = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    try:
        msgpack.unpackb(packed, strict_map_key=False)
    except TypeError:  # it comes out as a list
        return "a tuple can't be the key of a dict"
    return f"at most {MAX_DEPTH} levels" if _deeper([value], MAX_DEPTH + 1) else None
