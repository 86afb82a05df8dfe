"""Every reader of ours of what another process or a file holds, with whole samples, and what it may refuse with."""

import json
import random
import sys
import warnings
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

import msgpack
import numpy as np
from safetensors.numpy import save

from pipeline.checkpoints.marker import FORMAT, MARKER, STATE, Incomplete, check_complete, pack_state, read_state
from pipeline.commands.make_run_config import parse
from pipeline.commands.stored_config import read_run_config
from pipeline.errors import ConfigError, JournalError, RunError
from pipeline.journal.frames import FrameReader, frame, header
from pipeline.journal.log_bookmark import read_bookmark
from pipeline.journal.log_state import LoggedGroup, LoggedMember, LogState
from pipeline.journal.record_codec import pack_record, unpack_record
from pipeline.journal.records import Admitted, BatchRecord, ChunkRecord, GivenUp, Ready
from pipeline.rollouts.kept_members import RunningMember, pack_unfinished, read_kept
from pipeline.run_dir.json_lines import cut_torn_tail, read_lines
from pipeline.run_dir.run_files import BOOKMARK, EVENTS, LIVE, ROLLOUTS
from pipeline.run_dir.run_lock import owner
from pipeline.trajectory import Group, Span, Trajectory
from shm.errors import LedgerError, QueueError
from shm.ledger import Ledger, LedgerShape
from shm.queue import QueueConsumer, QueueProducer
from tests.hostile_bytes import spoiled, spoiled_values
from workers.errors import CheckpointError, MessageError
from workers.message_codec import _RECORDS, decode, encode
from workers.messages import KINDS, ToolRecord
from workers.model_files.checksum import checksum_of
from workers.model_files.safetensors_header import read_header


class Reader(NamedTuple):
    """samples: whole inputs. read(bytes, directory): raises only `refusals`. make: a spoiled input of `samples`."""

    samples: Sequence[bytes]
    read: Callable[[bytes, Path], object]
    refusals: tuple[type[Exception], ...]
    make: Callable[[random.Random, Sequence[bytes]], bytes]


def as_values(draws: random.Random, samples: Sequence[bytes]) -> bytes:
    """Half of the inputs are msgpack of spoiled values, so that they get beyond the unpacking."""
    if draws.random() < 0.5:
        return spoiled(draws, samples)
    values = msgpack.unpackb(draws.choice(samples), strict_map_key=False, unicode_errors="surrogatepass")
    for _ in range(draws.choice((1, 1, 2))):
        values = spoiled_values(draws, values)
    return msgpack.packb(values)


def as_json(draws: random.Random, samples: Sequence[bytes]) -> bytes:
    """The same of JSON."""
    if draws.random() < 0.5:
        return spoiled(draws, samples)
    return json.dumps(spoiled_values(draws, json.loads(draws.choice(samples))), default=repr).encode()


# --- messages ------------------------------------------------------------------------------------------------------


def some_value(kind: Any) -> Any:
    """One that fits a field's type."""
    if isinstance(kind, UnionType):
        return some_value(get_args(kind)[0])
    if hasattr(kind, "_fields"):
        return [some_value(one) for one in kind.__annotations__.values()]
    origin = get_origin(kind) or kind
    by_type = {int: 3, float: 0.5, str: "text", bool: True, list: [], dict: {"name": [1, None, "x"]}, bytes: b"\1"}
    return by_type[origin]


def some_messages() -> list[bytes]:
    """One of every kind, with a record wherever there is a list of them."""
    made = []
    for cls in KINDS.values():
        values = {f.name: some_value(f.type) for f in fields(cls)}
        for (of, name), record in _RECORDS.items():
            if of is cls:
                item = some_value(record)
                if "tools" in record._fields:
                    item[record._fields.index("tools")] = [some_value(ToolRecord)]
                values[name] = [item, item]
        made.append(encode(cls(**values), 2))
    return made


# --- journal, checkpoints, logs ------------------------------------------------------------------------------------


def some_trajectory(member: int) -> Trajectory:
    spans = [
        Span("prompt", [1, 2, 3], -1, -1, None, 0),
        Span("generated", [4, 5], 7, 7, [-0.5, -1.25], 0),
        Span("framing", [6], -1, -1, None, 0),
    ]
    return Trajectory(3, member, 9, spans, 0.5, None, None, 1, {"calls": 2.0})


def some_records() -> list[bytes]:
    whole = [some_trajectory(member) for member in range(2)]
    chunk = ChunkRecord(
        np.array([[3, 0, 0], [3, 1, 0]], dtype=np.int32), np.ones(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    )
    records = (
        Admitted(3, 9, 7, "row-9"),
        Ready(Group(3, 9, 7, whole, True, False, 1.5)),
        BatchRecord(1, 7, (3,), None, True, 1e-3, 1.0, (chunk,), 4, 0, 0, 0, 0),
        BatchRecord(2, 8, (3, 4), ((0, 1), (2,)), False, 1e-3, 1.0, (), 4, 0, 0, 0, 2),
        GivenUp("failed", 5, "it raised", 12),
    )
    return [pack_record(record) for record in records]


def journal_file(records: Sequence[bytes]) -> bytes:
    data = header(1, 0)
    for number, record in enumerate(records, 1):
        data += frame(record, 1, len(data), 0, number) + record
    return data


def read_journal(data: bytes, directory: Path) -> None:
    """As the last file of a journal, and as one before it."""
    path = directory / "00000001.log"
    path.write_bytes(data)
    try:
        for record in FrameReader(path, 1, is_last=True):
            unpack_record(record)
    finally:
        for _ in FrameReader(path, 1, is_last=False):
            pass


STATE_BYTES = pack_state({"journal": 4, "steps": 7, "owed": [[1, 2], [3, 4]], "metrics": {"a": 0.5}})
MARKER_VALUES = {
    "format": FORMAT,
    "version": 7,
    "journal": 4,
    "files": {STATE: [len(STATE_BYTES), checksum_of(STATE_BYTES)], "config.json": [2, checksum_of(b"{}")]},
}


def read_marker(data: bytes, directory: Path) -> None:
    (directory / MARKER).write_bytes(data)
    (directory / STATE).write_bytes(STATE_BYTES)
    (directory / "config.json").write_bytes(b"{}")
    read_state(directory, check_complete(directory, 7))


def read_saved_state(data: bytes, directory: Path) -> None:
    """A state whose marker fits it."""
    (directory / STATE).write_bytes(data)
    marker = MARKER_VALUES | {"files": {STATE: [len(data), checksum_of(data)]}}
    (directory / MARKER).write_bytes(msgpack.packb(marker))
    read_state(directory, check_complete(directory, 7))


def read_log(data: bytes, directory: Path) -> None:
    """A log is mended at its end; what is then refused is damage in its midst."""
    path = directory / "events.jsonl"
    path.write_bytes(data)
    cut_torn_tail(path)
    assert path.stat().st_size <= len(data) + 1
    for _ in read_lines(path):
        pass


def read_live(data: bytes, directory: Path) -> None:
    (directory / LIVE).write_bytes(data)
    assert owner(directory) is None  # nobody has it locked, whatever it says


def read_config(data: bytes, directory: Path) -> None:
    (directory / "config.json").write_bytes(data)
    path = list(sys.path)
    try:
        read_run_config(directory)
    finally:
        sys.path[:] = path


def some_config() -> bytes:
    return json.dumps(parse(["--device", "cpu"]).to_json() | {"directory": "/tmp"}).encode()


def read_tensors(data: bytes, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(data)
    infos = read_header(path)
    assert sum(info.num_bytes for info in infos.values()) <= len(data)


def kept_bytes(parts: Any) -> bytes:
    body = msgpack.packb(parts)
    return msgpack.packb([2, zlib.crc32(body), body])


def some_rollouts() -> list[bytes]:
    """Parts of rollouts.msgpack."""
    running = RunningMember(some_trajectory(1), 7, {"turns": [1, 2], "snapshot": {"x": 1}})
    return [pack_unfinished(3, [some_trajectory(0)], [running], {0: 1}), pack_unfinished(4, [], [])]


def spoiled_rollouts(draws: random.Random, samples: Sequence[bytes]) -> bytes:
    """Half of the files have a checksum that fits."""
    if draws.random() < 0.5:
        return spoiled(draws, [kept_bytes(list(samples))])
    return kept_bytes([as_values(draws, samples) for _ in range(draws.randrange(3))])


def read_rollouts(data: bytes, directory: Path) -> None:
    """A file that can't be read is passed over with a warning; what is read has the types that it is used by."""
    path = directory / ROLLOUTS
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read_kept(directory)
    for group, members in found.items():
        assert type(group) is int
        assert all(one.group == group and one.member == member for member, one in members.ended.items())
        for member, one in members.running.items():
            assert one.trajectory.group == group and one.trajectory.member == member
            assert one.version is None or type(one.version) is int
            assert type(one.state) is dict


LOG = b'{"t": 0.5, "event": "run"}\n' * 3


def some_logged() -> bytes:
    """What a bookmark says of `LOG`."""
    members = {0: LoggedMember("running", 3, 1, [(3, 3, 5)]), 1: LoggedMember("ended", None, 0, [])}
    log = LogState(1.5, 1, None, 3, 4, "optim", 7, 9, ("batch", 4), {6: LoggedGroup(2, 3, members)}, 2, True)
    return msgpack.packb(log.to_plain())


def bookmark_of(logged: bytes) -> bytes:
    """log.msgpack, with checksums that fit."""
    body = b"\x93" + msgpack.packb(len(LOG)) + msgpack.packb(zlib.crc32(LOG)) + logged
    return msgpack.packb([1, zlib.crc32(body), body])


def spoiled_bookmark(draws: random.Random, samples: Sequence[bytes]) -> bytes:
    """Half of the files have checksums that fit."""
    if draws.random() < 0.5:
        return spoiled(draws, samples)
    return bookmark_of(as_values(draws, [some_logged()]))


def use_bookmark(data: bytes, directory: Path) -> None:
    """A file that doesn't hold is passed over; what is read has the types that it is used by."""
    (directory / EVENTS).write_bytes(LOG)
    path = directory / BOOKMARK
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    end, log = read_bookmark(directory, 100)
    assert (end, log.num_decisions <= 100) in ((0, True), (len(LOG), True))
    assert LogState.from_plain(msgpack.unpackb(msgpack.packb(log.to_plain()))) == log
    for group, one in log.groups.items():
        assert all(type(number) is int for number in (group, one.row, one.version, *one.members))
        assert all(type(member.tokens) is int for member in one.members.values())


# --- shared memory -------------------------------------------------------------------------------------------------

SHAPE = LedgerShape(num_slots=3, num_reservations=4, num_workers=2)


def some_ledger() -> bytes:
    ledger_bytes = bytearray(SHAPE.num_bytes)
    ledger = Ledger(memoryview(ledger_bytes), SHAPE)
    ledger.format(run_id=77)
    ledger.write_reservations(5, [(1, 2), (3, 4)])
    ledger.worker(0).introduce(1234, 1)
    return bytes(ledger_bytes)


def spoiled_ledger(draws: random.Random, samples: Sequence[bytes]) -> bytes:
    """Half of the inputs have whole records of odd values, with check words that fit."""
    data = bytearray(draws.choice(samples))
    if draws.random() < 0.5:
        return spoiled(draws, samples)[: len(data)].ljust(len(data), b"\0")
    ledger = Ledger(memoryview(data), SHAPE)
    odd = [draws.choice((0, 1, 2, -1, 7, 2**62, -(2**63), 2**63 - 1)) for _ in range(SHAPE.reservations_words)]
    slot, reservations, worker = draws.randrange(3), SHAPE.reservations_word, SHAPE.workers_word
    ledger._write(SHAPE.slots_word + 4 * slot, odd[:3])
    ledger._write(reservations, odd[: SHAPE.reservations_words - 1])
    ledger._words[worker + 3 : worker + 9] = memoryview(array("q", odd[:6]))
    return bytes(data)


def read_ledger(data: bytes, directory: Path) -> None:
    """All that `headway top`, the gate and the watch read."""
    ledger = Ledger(memoryview(data), SHAPE)
    ledger.attach(77)
    ledger.policy_version()
    for slot in range(SHAPE.num_slots):
        ledger.slot(slot)
        ledger.read_lease(slot)
    _, owed = ledger.reservations()
    assert len(owed) <= SHAPE.num_reservations
    for index in range(SHAPE.num_workers):
        ledger.worker(index).read()


def use_queue(data: bytes, directory: Path) -> None:
    """Headers of messages, as 64-bit integers: (position, length) read, (consumed) released."""
    words = np.frombuffer(data[: len(data) // 8 * 8], dtype=np.int64).tolist()
    consumer, producer = QueueConsumer(memoryview(bytes(64))), QueueProducer(memoryview(bytearray(64)))
    producer.write(b"x" * 16)
    for position, length in zip(words[::2], words[1::2], strict=False):
        got = consumer.read(position, length)
        assert len(got) == length
        producer.release(position)


READERS: dict[str, Reader] = {
    "message": Reader(some_messages(), lambda data, _: decode(data), (MessageError,), as_values),
    "record": Reader(some_records(), lambda data, _: unpack_record(data), (JournalError,), as_values),
    "journal": Reader([journal_file(some_records()), journal_file([])], read_journal, (JournalError,), spoiled),
    "marker": Reader([msgpack.packb(MARKER_VALUES)], read_marker, (Incomplete, CheckpointError), as_values),
    "state": Reader([STATE_BYTES], read_saved_state, (CheckpointError,), as_values),
    "log": Reader([b'{"t": 0.5, "event": "run"}\n' * 3, b'{"t": 1}\n{"t": 2'], read_log, (RunError,), spoiled),
    "rollouts": Reader(some_rollouts(), read_rollouts, (), spoiled_rollouts),
    "bookmark": Reader([bookmark_of(some_logged())], use_bookmark, (), spoiled_bookmark),
    "live": Reader([b'{"pid": 17, "since": 1.5, "ledger": {"path": "x"}}'], read_live, (), as_json),
    "config": Reader([some_config()], read_config, (ConfigError,), as_json),
    "tensors": Reader([save({"a": np.ones(3), "b": np.zeros((2, 2))})], read_tensors, (CheckpointError,), spoiled),
    "ledger": Reader([some_ledger()], read_ledger, (LedgerError,), spoiled_ledger),
    "queue": Reader([np.array([0, 8, 8, 8, 16, 0]).tobytes()], use_queue, (QueueError,), spoiled),
}
