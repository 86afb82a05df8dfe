"""The journal's records: rows come back bit for bit, the codec loses nothing, and hostile bytes are refused."""

import math
import random
import struct
from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.advantages import GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import make_batch
from pipeline.batches.overlap import StreamedBatch
from pipeline.batches.rows import Rows
from pipeline.config import ForwardBackwardBatch, Truncation
from pipeline.errors import JournalError
from pipeline.journal.record_codec import (
    pack_record,
    pack_trajectory,
    pack_values,
    unpack_record,
    unpack_trajectory,
    unpack_values,
)
from pipeline.journal.records import Admitted, BatchRecord, ChunkRecord, GivenUp, Ready, chunk_of, rows_of
from pipeline.trajectory import Group, Span, Trajectory

SEEDS = st.integers(0, 2**32 - 1)


def random_trajectory(rng, group, member, trainable):
    """In up to three conditioning runs; `trainable`: as samplers and environments give them, else anything."""
    spans = []
    for run in range(rng.randint(1 if trainable else 0, 3)):
        spans.append(Span("prompt", random_ids(rng, 1), run=run))
        for _ in range(rng.randint(0, 4)):
            tokens = random_ids(rng, 0)
            if rng.random() < 0.5:
                spans.append(Span("framing", tokens, run=run))
                continue
            logprobs = [struct.unpack("<f", struct.pack("<f", -9 * rng.random()))[0] for _ in tokens]
            if not trainable:
                logprobs = rng.choice([logprobs, None, [], [0.1, -math.inf, 5e-324], [-0.0]])
            version = rng.randint(0, 9)
            spans.append(Span("generated", tokens, version, rng.randint(0, version), logprobs, run))
    row, turns, end = rng.randint(0, 9), rng.randint(0, 9), rng.choice([None, 0, 5])
    if trainable:
        return Trajectory(group, member, row, spans, rng.random(), None, end, turns)
    text = rng.choice(["turns", "", "\ud83d \udc00", "ü\u2028"])
    reward, metrics = rng.choice([None, 1, 0.1]), {text: rng.choice([1, 0.5, -math.inf])}
    return Trajectory(group, member, row, spans, reward, rng.choice([None, text]), end, turns, metrics)


def random_ids(rng, least):
    return [rng.choice([0, 7, 2**31 - 1]) for _ in range(rng.randint(least, 5))]


def random_group(rng, group=3, trainable=False):
    members = [random_trajectory(rng, group, member, trainable) for member in range(rng.randint(1, 3))]
    closed = rng.random() < 0.5
    return Group(group, rng.randint(0, 99), rng.randint(0, 99), members, rng.random() < 0.5, closed, 9 * rng.random())


def some_chunk(num_rows=2, num_predictions=5):
    keys = np.arange(3 * num_rows, dtype=np.int32).reshape(num_rows, 3)
    values = np.linspace(-1, 1, num_predictions, dtype=np.float32)
    return ChunkRecord(keys, values, np.abs(values))


BATCH = BatchRecord(
    step=4,
    version=2,
    groups=(7, 8),
    members=((0, 1), (3,)),
    updated=True,
    lr=1e-3,
    gradient_scale=1 / 3,
    chunks=(some_chunk(), some_chunk(0, 0)),
    tokens=55,
    masked=1,
    dropped=2,
    age_min=0,
    age_max=2,
)
TRAJECTORY = Trajectory(5, 1, 9, [Span("prompt", [1, 2]), Span("generated", [3], 4, 4, [-0.5])], 1.0, None, None, 1)
RECORDS = [
    Admitted(1, 2, 3),
    Admitted(1, 2, 3, "row-a"),
    Admitted(1, 2, 3, 77),
    Ready(Group(5, 9, 4, [TRAJECTORY], False, True, 1.5)),
    BATCH,
    replace(BATCH, members=None, updated=False, chunks=()),
    GivenUp("failed", 3, "the tool's half a pair: \ud800", 12),
    GivenUp("filtered", 3, "zero_variance", 0),
]


def same_rows(one: Rows, other: Rows) -> bool:
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(Rows)]
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was(record):
    assert unpack_record(pack_record(record)) == record


@given(SEEDS)
def test_no_group_loses_anything(seed):
    group = random_group(random.Random(seed))
    assert unpack_record(pack_record(Ready(group))) == Ready(group)


def test_a_conversation_is_not_kept():
    talkative = replace(TRAJECTORY, conversation=[{"role": "user", "content": "hello"}])
    assert unpack_trajectory(pack_trajectory(talkative)).conversation is None


def test_log_probs_of_samplers_take_four_bytes_and_others_stay_exact():
    def num_bytes(logprob):
        span = Span("generated", [1] * 1000, 0, 0, [logprob] * 1000)
        packed = pack_values(pack_trajectory(replace(TRAJECTORY, spans=[Span("prompt", [1]), span])))
        assert unpack_trajectory(unpack_values(packed)).spans[1].logprobs == [logprob] * 1000
        return len(packed)

    assert num_bytes(-0.5) < 8_200
    assert 12_000 < num_bytes(-0.1) < 12_200  # not a float32


@given(SEEDS)
def test_rows_come_back_bit_for_bit_in_one_pass(seed):
    rng = random.Random(seed)
    batch = [random_group(rng, group, trainable=True) for group in range(rng.randint(1, 4))]
    normalize = rng.choice(["token", "sequence", "prompt"])
    rules = BatchRules(advantage=GroupCentered(), normalize=normalize, truncation=Truncation(), train_all=True)
    made = make_batch(batch, 10, rules)
    chunk = unpack_record(pack_record(replace(BATCH, chunks=(chunk_of(made.rows),)))).chunks[0]
    by_name = {(t.group, t.member): t for one in batch for t in one.trajectories}
    assert same_rows(rows_of(chunk, by_name), made.rows)


def test_rows_of_overlap_come_back_in_the_order_of_their_chunks():
    def member(group, number, reward):
        first = [Span("prompt", [1, group]), Span("generated", [2, 3], 0, 0, [-0.1, -0.2])]
        second = [Span("prompt", [9], run=1), Span("generated", [4, number], 0, 0, [-0.3, -0.4], run=1)]
        return Trajectory(group, number, 0, first + second, reward)

    batch = [Group(g, 0, 0, [member(g, 0, 1.0), member(g, 1, 0.1 * g)]) for g in range(3)]
    rules = BatchRules(advantage=GroupCentered(), normalize="token", truncation=Truncation(), streamed=True)
    streamed = StreamedBatch(ForwardBackwardBatch(min_sequences=5, min_tokens=None), 0, rules)
    sent = [chunk for group in (2, 0, 1) for chunk in streamed.add(batch[group])]
    sent += streamed.flush(batch)[0]
    by_name = {(t.group, t.member): t for one in batch for t in one.trajectories}
    assert [chunk.groups.tolist() for chunk in sent] == [[2] * 4 + [0] * 4, [1] * 4]
    assert all(same_rows(rows_of(chunk_of(chunk), by_name), chunk) for chunk in sent)


def test_rows_of_other_trajectories_are_refused():
    keys = np.array([[5, 1, 0]], dtype=np.int32)
    chunk = ChunkRecord(keys, np.ones(1, dtype=np.float32), np.ones(1, dtype=np.float32))
    assert rows_of(chunk, {(5, 1): TRAJECTORY}).tokens.tolist() == [1, 2, 3]
    with pytest.raises(JournalError, match=r"trains trajectory 5\.1 .*no `ready` record"):
        rows_of(chunk, {})
    with pytest.raises(JournalError, match=r"5\.1 has no row that begins at token 4"):
        rows_of(replace(chunk, keys=keys + [0, 0, 4]), {(5, 1): TRAJECTORY})
    longer = replace(TRAJECTORY, spans=[*TRAJECTORY.spans, Span("generated", [3], 4, 4, [-0.5])])
    with pytest.raises(JournalError, match="2 tokens were generated, and 1 have a weight"):
        rows_of(chunk, {(5, 1): longer})


def test_no_rows_are_a_chunk_too():
    rows = rows_of(some_chunk(0, 0), {})
    assert (rows.num_rows, rows.num_tokens) == (0, 0)


def changed(record, path, value):
    """The record's bytes with one of its values replaced."""
    values = unpack_values(pack_record(record))
    inner = values
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return pack_values(values)


@pytest.mark.parametrize(
    ("record", "path", "value"),
    [
        (RECORDS[0], [0], 9),  # an unknown kind
        (RECORDS[0], [1], -1),
        (RECORDS[0], [1], True),
        (RECORDS[0], [4], 0.5),
        (RECORDS[3], [4], "members"),
        (RECORDS[3], [4, 0], None),
        (RECORDS[3], [4, 0, 0], 6),  # a member of another group
        (RECORDS[3], [4, 0, 7], {"name": "text"}),
        (RECORDS[3], [4, 0, 8], b"\x00\x07"),  # a kind of span that there is not
        (RECORDS[3], [4, 0, 9], b"\x00"),
        (RECORDS[3], [4, 0, 12], struct.pack("<ii", -1, 4)),
        (RECORDS[3], [4, 0, 12], struct.pack("<ii", 1, 1)),  # fewer tokens than there are
        (RECORDS[3], [4, 0, 13], struct.pack("<ii", -1, 2**31 - 1)),
        (RECORDS[3], [4, 0, 13], struct.pack("<ii", -2, 1)),
        (RECORDS[3], [4, 0, 14], 2**63),
        (BATCH, [3], "groups"),
        (BATCH, [3, 0], "7"),
        (BATCH, [4], [[0]]),  # members of one group only
        (BATCH, [4, 0], [-1]),
        (BATCH, [6], 1),
        (BATCH, [8, 0, 0], b"1234"),
        (BATCH, [8, 0, 1], b"1234"),
        (RECORDS[6], [1], "lost"),
        (RECORDS[6], [3], b"cause"),
    ],
)
def test_a_wrong_value_is_refused(record, path, value):
    with pytest.raises(JournalError, match="can't be read"):
        unpack_record(changed(record, path, value))


def test_a_member_that_is_there_twice_is_refused():
    twice = Ready(replace(RECORDS[3].group, trajectories=[TRAJECTORY, TRAJECTORY]))
    with pytest.raises(JournalError, match="one member twice"):
        unpack_record(pack_record(twice))


@given(st.sampled_from(RECORDS), st.data())
def test_bytes_changed_anywhere_are_read_or_refused(record, data):
    packed = bytearray(pack_record(record))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    del packed[data.draw(st.integers(1, len(packed))) :]
    try:
        unpack_record(bytes(packed))
    except JournalError as error:
        assert "can't be read" in str(error)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    with pytest.raises(JournalError, match="can't be read"):
        unpack_record(data)


def test_declared_lengths_are_not_believed():
    for start in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(JournalError, match="are no msgpack"):
            unpack_record(start + b"\x01" * 20)
    with pytest.raises(JournalError, match="are no msgpack"):
        unpack_record(b"\x91" * 100_000)  # lists in lists
    with pytest.raises(JournalError, match="no known kind"):
        unpack_record(msgpack.packb(list(range(100_000))))
