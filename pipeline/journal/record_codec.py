"""The journal's records as msgpack and back: arrays as bytes, nothing lost, and hostile bytes refused.

A trajectory's spans are columns (little-endian int32; log-probs float32 where they fit it exactly, else float64), so
that reading one back is a few slices however many spans it has. Conversations are not kept: no training needs them.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from pipeline.errors import JournalError
from pipeline.journal.records import Admitted, BatchRecord, ChunkRecord, GivenUp, Ready, Record
from pipeline.trajectory import Group, Span, Trajectory

# Numbers of the kinds of records, part of the format: never reuse one.
_KINDS: dict[type[Record], int] = {Admitted: 1, Ready: 2, BatchRecord: 3, GivenUp: 4}

_SPAN_KINDS = ("prompt", "generated", "framing")  # by number, part of the format
_INT, _FLOAT, _DOUBLE = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8")
_NO_LOGPROBS = -1  # in place of their number
# Lists hold groups of a batch or members of a group; a declared length is not believed beyond this before memory is
# taken for it. Texts and arrays are bounded by the bytes there are.
_MAX_LIST = 1 << 20


def pack_record(record: Record) -> bytes:
    """One record."""
    match record:
        case Admitted():
            fields = [record.group, record.row, record.version, record.id]
        case Ready():
            fields = pack_group(record.group)
        case BatchRecord():
            members = None if record.members is None else [list(part) for part in record.members]
            fields = [record.step, record.version, list(record.groups), members, record.updated]
            fields += [float(record.lr), float(record.gradient_scale), [_pack_chunk(chunk) for chunk in record.chunks]]
            fields += [record.tokens, record.masked, record.dropped, record.age_min, record.age_max]
        case GivenUp():
            fields = [record.event, record.group, record.cause, record.tokens]
    return pack_values([_KINDS[type(record)], *fields])


def unpack_record(data: bytes) -> Record:
    """Raises JournalError for bytes that are no record."""
    match unpack_values(data):
        case [1, int(group), int(row), int(version), None | int() | str() as row_id] if _counts(group, row, version):
            return Admitted(group, row, version, row_id)
        case [2, *fields]:
            return Ready(unpack_group(fields))
        case [3, *fields]:
            return _unpack_batch(fields)
        case [4, "failed" | "filtered" as event, int(group), str(cause), int(tokens)] if _counts(group, tokens):
            return GivenUp(event, group, cause, tokens)
    raise _malformed("it is of no known kind, or one of its fields is of the wrong type")


def pack_group(group: Group) -> list[Any]:
    """A group, or a part of one, as plain values for msgpack; lossless but for conversations."""
    return [
        group.group,
        group.row,
        group.version,
        [pack_trajectory(trajectory) for trajectory in group.trajectories],
        group.final,
        group.closed_by_deadline,
        float(group.seconds),
    ]


def unpack_group(values: Any) -> Group:
    """Raises JournalError for values that are no group."""
    match values:
        case [int(group), int(row), int(version), list(members), bool(final), bool(closed), float(seconds)] if _counts(
            group, row, version
        ):
            trajectories = [unpack_trajectory(member) for member in members]
            if any(one.group != group for one in trajectories):
                raise _malformed(f"group {group} holds a trajectory of another group")
            if len({one.member for one in trajectories}) < len(trajectories):
                raise _malformed(f"group {group} holds one member twice")
            return Group(group, row, version, trajectories, final, closed, seconds)
    raise _malformed("a group has the wrong fields")


def pack_trajectory(trajectory: Trajectory) -> list[Any]:
    """A trajectory as plain values for msgpack; lossless but for its conversation."""
    spans = trajectory.spans
    with_logprobs = [span.logprobs for span in spans if span.logprobs is not None]
    logprobs = np.array([value for values in with_logprobs for value in values], dtype=_DOUBLE)
    with np.errstate(over="ignore"):
        short = logprobs.astype(_FLOAT)
    if np.array_equal(short, logprobs):  # as samplers give them
        logprobs = short
    return [
        trajectory.group,
        trajectory.member,
        trajectory.row,
        trajectory.reward,
        trajectory.truncated,
        trajectory.loss_mask_end,
        trajectory.num_turns,
        trajectory.metrics,
        bytes(_SPAN_KINDS.index(span.kind) for span in spans),
        _ints([span.version for span in spans]),
        _ints([span.kv_version for span in spans]),
        _ints([span.run for span in spans]),
        _ints([len(span.tokens) for span in spans]),
        _ints([_NO_LOGPROBS if span.logprobs is None else len(span.logprobs) for span in spans]),
        _ints([token for span in spans for token in span.tokens]),
        logprobs.tobytes(),
    ]


def unpack_trajectory(values: Any) -> Trajectory:
    """Raises JournalError for values that are no trajectory."""
    match values:
        case [
            int(group),
            int(member),
            int(row),
            None | int() | float() as reward,
            None | str() as truncated,
            None | int() as loss_mask_end,
            int(num_turns),
            dict(metrics),
            bytes(kinds),
            *columns,
            bytes(logprobs),
        ] if len(columns) == 6 and _counts(group, member, row, num_turns):
            if not all(type(name) is str and type(value) in (int, float) for name, value in metrics.items()):
                raise _malformed(f"trajectory {group}.{member} has metrics that are no numbers by name")
            spans = _unpack_spans(kinds, [_array(column, _INT) for column in columns], logprobs)
            return Trajectory(group, member, row, spans, reward, truncated, loss_mask_end, num_turns, metrics)
    raise _malformed("a trajectory has the wrong fields")


def _unpack_spans(kinds: bytes, columns: Sequence[np.ndarray], logprob_bytes: bytes) -> list[Span]:
    """columns: versions, kv_versions, runs, numbers of tokens, numbers of log-probs: one a span; then all tokens."""
    *of_spans, tokens = columns
    versions, kv_versions, runs, num_tokens, num_logprobs = (column.tolist() for column in of_spans)
    if {len(column) for column in of_spans} != {len(kinds)} or max(kinds, default=0) >= len(_SPAN_KINDS):
        raise _malformed("a trajectory's spans are not all there")
    total_logprobs = sum(max(0, number) for number in num_logprobs)
    if min(num_tokens, default=0) < 0 or sum(num_tokens) != len(tokens) or min(num_logprobs, default=0) < _NO_LOGPROBS:
        raise _malformed(f"a trajectory's {len(tokens)} tokens are not those of its spans")
    dtype = _FLOAT if len(logprob_bytes) == _FLOAT.itemsize * total_logprobs else _DOUBLE
    if len(logprob_bytes) != dtype.itemsize * total_logprobs:
        raise _malformed(f"{total_logprobs} log-probs don't fill {len(logprob_bytes)} bytes")
    ids, logprobs = tokens.tolist(), np.frombuffer(logprob_bytes, dtype).tolist()
    spans, token, logprob = [], 0, 0
    for index, kind in enumerate(kinds):
        end, number = token + num_tokens[index], num_logprobs[index]
        own = None if number == _NO_LOGPROBS else logprobs[logprob : logprob + number]
        spans.append(
            Span(_SPAN_KINDS[kind], ids[token:end], versions[index], kv_versions[index], own, runs[index]),
        )
        token, logprob = end, logprob + max(0, number)
    return spans


def _pack_chunk(chunk: ChunkRecord) -> list[bytes]:
    return [
        chunk.keys.astype(_INT, copy=False).tobytes(),
        chunk.weights.astype(_FLOAT, copy=False).tobytes(),
        chunk.scales.astype(_FLOAT, copy=False).tobytes(),
    ]


def _unpack_chunk(values: Any) -> ChunkRecord:
    match values:
        case [bytes(keys), bytes(weights), bytes(scales)] if len(weights) == len(scales) and len(keys) % 12 == 0:
            return ChunkRecord(
                _array(keys, _INT).reshape(-1, 3).astype(np.int32),
                _array(weights, _FLOAT).astype(np.float32),
                _array(scales, _FLOAT).astype(np.float32),
            )
    raise _malformed("a batch's chunk has the wrong fields")


def _unpack_batch(fields: list[Any]) -> BatchRecord:
    match fields:
        case [
            int(step),
            int(version),
            list(groups),
            None | list() as parts,
            bool(updated),
            float(lr),
            float(gradient_scale),
            list(chunks),
            *counts,
        ] if len(counts) == 5 and _counts(step, version, *groups, *counts):
            members = None if parts is None else tuple(_members(part) for part in parts)
            if members is not None and len(members) != len(groups):
                raise _malformed(f"batch {step} names members of {len(members)} groups, not of {len(groups)}")
            unpacked = tuple(_unpack_chunk(chunk) for chunk in chunks)
            return BatchRecord(step, version, tuple(groups), members, updated, lr, gradient_scale, unpacked, *counts)
    raise _malformed("a batch has the wrong fields")


def _members(part: Any) -> tuple[int, ...]:
    if type(part) is not list or not _counts(*part):
        raise _malformed("a batch names members that are no numbers")
    return tuple(part)


def _counts(*values: Any) -> bool:
    """Whole numbers from 0 (patterns take True for a number)."""
    return all(type(value) is int and value >= 0 for value in values)


def _ints(values: list[int]) -> bytes:
    return np.array(values, dtype=_INT).tobytes()


def _array(data: Any, dtype: np.dtype) -> np.ndarray:
    if type(data) is not bytes or len(data) % dtype.itemsize:
        raise _malformed(f"an array is no multiple of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)


def pack_values(values: Any) -> bytes:
    """Plain values as msgpack, for files that a resume reads. Half a surrogate pair (in a cause, say) is kept."""
    return msgpack.packb(values, unicode_errors="surrogatepass")


def unpack_values(data: bytes) -> Any:
    """Raises JournalError for bytes that are not exactly one msgpack value."""
    limit = min(len(data), _MAX_LIST)
    try:
        return msgpack.unpackb(data, max_array_len=limit, max_map_len=limit, unicode_errors="surrogatepass")
    except Exception as error:  # msgpack raises a family of unrelated classes on torn or foreign bytes
        raise _malformed(f"{len(data)} bytes are no msgpack ({type(error).__name__}: {error})") from error


def _malformed(why: str) -> JournalError:
    return JournalError(f"A record can't be read: {why}. It is damaged, or another version of Headway wrote it.")
