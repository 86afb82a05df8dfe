"""JSON schemas of tool parameters, and the conversion of what a model wrote to what the function expects.

Models write `"3"` for 3, `3.0` for 3 or a JSON text for a list; what has one plain reading is converted, anything
else is an `ArgumentError` whose text goes back to the model.
"""

import json
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ConfigTypeError

_INTEGER = re.compile(r"\s*[+-]?\d+\s*")


class ArgumentError(ValueError):
    """A model's tool arguments do not fit the tool's schema; the text is for the model."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One parameter type. `convert(value, coerce)` gives the value for the function, or raises `ArgumentError`."""

    schema: dict[str, Any]
    wanted: str  # "an integer": completes "it must be …"
    convert: Callable[[Any, bool], Any]


def _refuse(value: Any, wanted: str) -> ArgumentError:
    shown = repr(value)
    return ArgumentError(f"{shown if len(shown) <= 80 else shown[:77] + '...'}; it must be {wanted}")


def _to_string(value: Any, coerce: bool) -> str:
    if isinstance(value, str):
        return value
    if coerce and isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise _refuse(value, "a string")


def _to_integer(value: Any, coerce: bool) -> int:
    if type(value) is int:
        return value
    if coerce and isinstance(value, float) and value.is_integer():
        return int(value)
    if coerce and isinstance(value, str) and _INTEGER.fullmatch(value) and len(value) <= 40:
        return int(value)
    raise _refuse(value, "an integer")


def _to_number(value: Any, coerce: bool) -> float:
    number = math.nan
    if type(value) in (int, float) or (coerce and isinstance(value, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            pass
    if not math.isfinite(number):
        raise _refuse(value, "a finite number")
    return number


def _to_boolean(value: Any, coerce: bool) -> bool:
    if isinstance(value, bool):
        return value
    if coerce and isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise _refuse(value, "true or false")


def _to_null(value: Any, coerce: bool) -> None:
    if value is not None:
        raise _refuse(value, "null")


_PLAIN = {
    str: Kind({"type": "string"}, "a string", _to_string),
    int: Kind({"type": "integer"}, "an integer", _to_integer),
    float: Kind({"type": "number"}, "a finite number", _to_number),
    bool: Kind({"type": "boolean"}, "true or false", _to_boolean),
    types.NoneType: Kind({"type": "null"}, "null", _to_null),
    Any: Kind({}, "any JSON value", lambda value, coerce: value),
}


def _parsed(value: Any, coerce: bool) -> Any:
    """A list or object that the model wrote as JSON text; anything else as it is."""
    if coerce and isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            pass
    return value


def _list_of(item: Kind) -> Kind:
    wanted = f"a list, each item {item.wanted}"

    def convert(value: Any, coerce: bool) -> list:
        found = _parsed(value, coerce)
        if not isinstance(found, list):
            raise _refuse(value, wanted)
        return [item.convert(one, coerce) for one in found]

    return Kind({"type": "array", "items": item.schema}, wanted, convert)


def _dict_of(item: Kind) -> Kind:
    wanted = f"an object, each value {item.wanted}"

    def convert(value: Any, coerce: bool) -> dict:
        found = _parsed(value, coerce)
        if not isinstance(found, dict):
            raise _refuse(value, wanted)
        return {str(key): item.convert(one, coerce) for key, one in found.items()}

    return Kind({"type": "object", "additionalProperties": item.schema}, wanted, convert)


def _one_of(options: tuple[Any, ...]) -> Kind:
    wanted = "one of " + ", ".join(json.dumps(option) for option in options)

    def convert(value: Any, coerce: bool) -> Any:
        for option in options:
            if type(option) is type(value) and option == value:
                return option
        for option in options:
            if coerce and str(option) == str(value):
                return option
        raise _refuse(value, wanted)

    return Kind({"enum": list(options)}, wanted, convert)


def _any_of(kinds: list[Kind]) -> Kind:
    wanted = " or ".join(kind.wanted for kind in kinds)

    def convert(value: Any, coerce: bool) -> Any:
        # A value that is already of one of the types stays as it is: "3" for `int | str` is a string.
        for coerce_now in (False, True) if coerce else (False,):
            for kind in kinds:
                try:
                    return kind.convert(value, coerce_now)
                except ArgumentError:
                    continue
        raise _refuse(value, wanted)

    return Kind({"anyOf": [kind.schema for kind in kinds]}, wanted, convert)


def kind_of(annotation: Any, where: str) -> Kind:
    """The `Kind` of a Python annotation; `where` names the parameter in the `ConfigTypeError` for unusable ones."""
    plain = _PLAIN.get(annotation) if isinstance(annotation, typing.Hashable) else None
    if plain is not None:
        return plain
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is list and len(arguments) <= 1:
        return _list_of(kind_of(arguments[0] if arguments else Any, where))
    if origin is dict and (not arguments or arguments[0] is str):
        return _dict_of(kind_of(arguments[1] if arguments else Any, where))
    if origin is typing.Literal and all(isinstance(option, (str, int, bool)) for option in arguments):
        return _one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        return _any_of([kind_of(argument, where) for argument in arguments])
    raise ConfigTypeError(
        f"{where} has the annotation {annotation!r}. Tool parameters are of type str, int, float, bool, None, Any, "
        "list[...], dict[str, ...], Literal[...] or a union of these. Use one of them and convert inside the tool."
    )
