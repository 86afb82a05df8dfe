"""Messages as bytes and back: msgpack, versioned and checked. Nothing received is ever unpickled or executed.

A message on the wire is the array `[PROTOCOL, incarnation, kind, field, field, …]`; `incarnation` counts the starts of
the worker at the other end, so a late message of a dead predecessor is told apart. Records inside a message
(`GenerateRequest`, …) are arrays too.
"""

from dataclasses import fields
from reprlib import repr as shown  # of lists in lists, as deep as msgpack reads them, `repr` can't be had
from types import UnionType
from typing import Any, get_origin, get_type_hints

import msgpack

from workers.errors import MessageError
from workers.messages import (
    KINDS,
    EnvironmentCall,
    EnvironmentReplies,
    EnvironmentReply,
    Environments,
    Generate,
    GenerateRequest,
    Message,
    Segment,
    Segments,
    ToolRecord,
)

PROTOCOL = 2

# Fields that hold a list of records: the decoder makes named tuples of them again.
_RECORDS: dict[tuple[type[Message], str], type] = {
    (Generate, "requests"): GenerateRequest,
    (Segments, "segments"): Segment,
    (Environments, "calls"): EnvironmentCall,
    (EnvironmentReplies, "replies"): EnvironmentReply,
}
_NUMBERS = {cls: kind for kind, cls in KINDS.items()}
_NAMES = {cls: [f.name for f in fields(cls)] for cls in KINDS.values()}


def _checks(cls: type[Message]) -> list[tuple[str, Any]]:
    """What a field's value must be an instance of: lists and dicts by their outer type only."""
    return [(f.name, _outer_type(f.type)) for f in fields(cls)]


def _outer_type(kind: Any) -> Any:
    """For isinstance: `list[int]` -> list, `float` -> float or int, unions as they are."""
    if isinstance(kind, UnionType):
        return kind
    kind = get_origin(kind) or kind
    return (float, int) if kind is float else kind


_CHECKS = {cls: _checks(cls) for cls in KINDS.values()}


_RECORD_TYPES = {
    record: [_outer_type(kind) for kind in get_type_hints(record).values()]
    for record in (GenerateRequest, Segment, ToolRecord, EnvironmentCall, EnvironmentReply)
}


def encode(message: Message, incarnation: int) -> bytes:
    """One message as msgpack."""
    cls = type(message)
    return msgpack.packb([PROTOCOL, incarnation, _NUMBERS[cls], *(getattr(message, name) for name in _NAMES[cls])])


def decode(data: bytes) -> tuple[int, Message]:
    """(incarnation, message). Raises MessageError for anything that is no message of this protocol version."""
    try:
        values = msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # msgpack raises a family of unrelated classes on torn or foreign bytes
        raise MessageError(f"A message of {len(data)} bytes is no msgpack: {error}.") from error
    if not isinstance(values, list) or len(values) < 3:
        raise MessageError(f"A message of {len(data)} bytes is no array of protocol, incarnation, kind and fields.")
    protocol, incarnation, kind, *content = values
    if protocol != PROTOCOL:
        raise MessageError(
            f"A message speaks protocol {shown(protocol)}, this process speaks {PROTOCOL}: two versions of "
            "Headway run together."
        )
    cls = KINDS.get(kind) if isinstance(kind, int) else None
    if cls is None or not isinstance(incarnation, int):
        raise MessageError(
            f"A message is of kind {shown(kind)} and incarnation {shown(incarnation)}; there is no such kind."
        )
    checks = _CHECKS[cls]
    if len(content) != len(checks):
        raise MessageError(f"A {cls.__name__} message has {len(content)} fields, not {len(checks)}.")
    for index, (name, wanted) in enumerate(checks):
        if not isinstance(content[index], wanted):
            raise MessageError(f"{cls.__name__}.{name} is {shown(content[index])}, which is of the wrong type.")
        record = _RECORDS.get((cls, name))
        if record is not None:
            content[index] = [_as_record(record, item) for item in content[index]]
    return incarnation, cls(*content)


def _as_record(record: type, item: Any) -> Any:
    """A named tuple of `item`. Raises MessageError unless it is a list with the right number and types of fields."""
    if not isinstance(item, list) or len(item) != len(record._fields):
        raise MessageError(
            f"A {record.__name__} record is {shown(item)}, not an array of {len(record._fields)} fields."
        )
    if not all(map(isinstance, item, _RECORD_TYPES[record])):
        raise MessageError(f"A {record.__name__} record is {shown(item)}, with a field of the wrong type.")
    if record is EnvironmentReply:
        item[2] = [_as_record(ToolRecord, tool) for tool in item[2]]
    return record(*item)
