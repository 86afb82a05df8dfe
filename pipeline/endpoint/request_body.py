"""The JSON body of a request, read strictly: an object of plain values that can be sent on, or a `Refusal`."""

import json
from typing import Any

from pipeline.chat.call_json import MAX_DEPTH
from pipeline.dataset import why_not_plain
from pipeline.endpoint.refusal import BAD_REQUEST, Refusal


def read_body(body: bytes) -> dict[str, Any]:
    """The object of a body; nothing at all is an empty one."""
    if not body:
        return {}
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise no_json(f"it is no UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise no_json(str(error)) from None
    if not isinstance(value, dict):
        raise no_json(f"it is {_kind(value)}, not an object")
    _check_depth(value)
    if why_not_plain(value) is not None:  # halves of a surrogate pair, whole numbers beyond 64 bits
        for name, one in value.items():
            if (why := why_not_plain({name: one})) is not None:
                raise no_json(f"{name!r:.80} holds what can't be sent on ({why})")
    return value


def no_json(why: str) -> Refusal:
    """The body is none that is read here."""
    return Refusal(
        BAD_REQUEST, f"The body of the request can't be read: {why}. Send one JSON object.", code="invalid_json"
    )


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> Refusal:
    return no_json(f"it nests lists and objects more than {MAX_DEPTH} deep")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
