"""The version ledger in one process: tables, checks, torn records."""

import time

import pytest

from shm import ledger as ledger_module
from shm.errors import LedgerError
from shm.ledger import Activity, Ledger, LedgerShape, State

SHAPE = LedgerShape(num_slots=4, num_reservations=6, num_workers=3)


@pytest.fixture
def memory():
    return memoryview(bytearray(SHAPE.num_bytes))


@pytest.fixture
def ledger(memory):
    ledger = Ledger(memory, SHAPE)
    ledger.format(run_id=77)
    return ledger


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ledger_module, "_NAPS", 0)


def test_a_fresh_ledger_is_empty(ledger, memory):
    reader = Ledger(memory.toreadonly(), SHAPE)
    assert reader.attach() == 77
    assert reader.policy_version() == 0
    assert reader.reservations() == (0, [])
    for slot in range(4):
        found = reader.slot(slot)
        assert (found.version, found.state, found.checksum, reader.read_lease(slot)) == (-1, State.EMPTY, 0, 0)
    for index in range(3):
        found = reader.worker(index).read()
        assert (found.pid, found.incarnation, found.heartbeat_ns) == (0, -1, 0)


def test_every_table_is_read_back_as_written(ledger, memory):
    reader = Ledger(memory, SHAPE)
    for slot in range(4):
        ledger.write_slot(slot, 10 + slot, State.READY, 2**62 + slot)
        ledger.write_lease(slot, 100 + slot)
    ledger.write_policy_version(13)
    owed = [(group, 11) for group in range(6)]
    ledger.write_reservations(5, owed)
    before = time.monotonic_ns()
    for index in range(3):
        ledger.worker(index).introduce(1000 + index, index)
        ledger.worker(index).beat(Activity.BUSY, 50 + index)
    for slot in range(4):
        found = reader.slot(slot)
        assert (found.version, found.state, found.checksum) == (10 + slot, State.READY, 2**62 + slot)
        assert reader.read_lease(slot) == 100 + slot
    assert reader.policy_version() == 13
    assert reader.reservations(5) == (5, owed)
    for index in range(3):
        found = reader.worker(index).read()
        assert (found.pid, found.incarnation, found.activity, found.counter) == (1000 + index, index, 3, 50 + index)
        assert before <= found.heartbeat_ns <= time.monotonic_ns()
    assert reader.attach(run_id=77) == 77


def test_a_shorter_reservation_table_forgets_the_longer_one(ledger):
    ledger.write_reservations(1, [(1, 0), (2, 0), (3, 0)])
    ledger.write_reservations(2, [(3, 0)])
    assert ledger.reservations() == (2, [(3, 0)])


def test_reservations_older_than_asked_for_are_refused(ledger):
    ledger.write_reservations(4, [])
    with pytest.raises(LedgerError, match="epoch 4; the step needs those of epoch 5"):
        ledger.reservations(5)


def test_more_reservations_than_there_is_room_for_are_refused(ledger):
    with pytest.raises(LedgerError, match="7 groups are owed training, .* room for 6"):
        ledger.write_reservations(1, [(group, 0) for group in range(7)])
    assert ledger.reservations() == (0, [])


def test_tables_of_different_writers_share_no_cache_line():
    starts = (SHAPE.version_word, SHAPE.slots_word, SHAPE.leases_word, SHAPE.reservations_word, SHAPE.workers_word)
    assert all(start % 8 == 0 for start in starts)
    assert len(set(starts)) == 5


@pytest.mark.parametrize("slot", [-1, 4])
def test_there_is_no_slot_beyond_the_table(ledger, slot):
    for call in (ledger.slot, ledger.read_lease):
        with pytest.raises(LedgerError, match="no weight slot"):
            call(slot)
    with pytest.raises(LedgerError, match="no weight slot"):
        ledger.write_lease(slot, 1)
    with pytest.raises(LedgerError, match="no worker"):
        ledger.worker(slot)


def changed_words(ledger, write):
    """Indices of the words that `write` changed, the memory before, and after."""
    before = ledger._words.tolist()
    write()
    after = ledger._words.tolist()
    return [index for index in range(len(before)) if before[index] != after[index]], before, after


@pytest.mark.parametrize(
    "write, read",
    [
        (lambda ledger: ledger.write_slot(2, 9, State.READY, 5), lambda ledger: ledger.slot(2)),
        (lambda ledger: ledger.write_reservations(9, [(8, 7), (6, 5)]), lambda ledger: ledger.reservations()),
        (lambda ledger: ledger.worker(1).introduce(4321, 2), lambda ledger: ledger.worker(1).read().pid),
    ],
    ids=["slot", "reservations", "worker"],
)
def test_a_record_is_seen_before_or_after_a_write_and_never_between(ledger, impatient, write, read):
    old = read(ledger)
    words, before, after = changed_words(ledger, lambda: write(ledger))
    new = read(ledger)
    record = [
        index for index in words if (index - SHAPE.workers_word) % 16 < 3 or index < SHAPE.workers_word
    ]  # no heartbeats
    seen = []
    for mixture in range(1 << len(record)):  # every order in which the words could become visible passes through these
        for bit, index in enumerate(record):
            ledger._words[index] = after[index] if mixture >> bit & 1 else before[index]
        try:
            seen.append(read(ledger))
        except LedgerError as error:
            assert "stayed torn" in str(error)
    assert len(record) >= 3 and set(map(repr, seen)) == {repr(old), repr(new)}


def test_a_torn_record_is_read_again_until_it_is_whole(ledger, monkeypatch):
    words, before, after = changed_words(ledger, lambda: ledger.write_reservations(3, [(1, 2)]))
    ledger._words[words[0]] = before[words[0]]
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            ledger._words[words[0]] = after[words[0]]

    monkeypatch.setattr(ledger_module.time, "sleep", sleep)
    assert ledger.reservations() == (3, [(1, 2)])
    assert len(naps) == 3


def test_a_record_may_not_pass_for_another(ledger, impatient):
    ledger.write_slot(0, 5, State.READY)
    start = SHAPE.slots_word
    ledger._words[start + 4 : start + 8] = ledger._words[start : start + 4]
    with pytest.raises(LedgerError, match="slot 1 record stayed torn"):
        ledger.slot(1)


def test_attach_refuses_what_is_no_ledger_or_another_one(ledger, memory):
    with pytest.raises(LedgerError, match="no ledger of layout"):
        Ledger(memoryview(bytearray(SHAPE.num_bytes)), SHAPE).attach()
    with pytest.raises(LedgerError, match="belongs to run 77, not to run 78"):
        ledger.attach(run_id=78)
    smaller = LedgerShape(num_slots=3, num_reservations=6, num_workers=3)
    with pytest.raises(LedgerError, match="was made as"):
        Ledger(memory, smaller).attach()
    with pytest.raises(LedgerError, match="needs .* bytes; the block has"):
        Ledger(memory[:-8], SHAPE)


def test_a_shape_survives_a_message_and_refuses_nonsense():
    assert LedgerShape.from_fields(SHAPE.to_fields()) == SHAPE
    with pytest.raises(LedgerError, match="Not a ledger's shape"):
        LedgerShape.from_fields({"num_slots": 3})
    with pytest.raises(LedgerError, match="negative"):
        LedgerShape(num_slots=-1, num_reservations=6, num_workers=3)


def test_a_workers_time_is_booked_to_what_it_was_doing(ledger, monkeypatch):
    """Every nanosecond since the first beat is in one account, up to the moment of the question."""
    now = [1_000]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    row = ledger.worker(0)
    row.introduce(1, 1)
    for activity, lasts in (
        (Activity.BUSY, 5),  # 3 of them STARTING before
        (Activity.IDLE, 70),
        (Activity.WAITING, 900),
        (Activity.PUBLISHING, 20),
        (Activity.IDLE, 1),
    ):
        now[0] += 3 if activity == Activity.BUSY else 0
        row.beat(activity)
        now[0] += lasts
    found = row.read()
    assert (found.busy_ns, found.waiting_ns, found.idle_ns) == (3 + 5 + 20, 900, 70)
    assert found.times_ns(now[0]) == (28, 900, 71)
    assert sum(found.times_ns(now[0])) == now[0] - 1_000


def test_a_successor_goes_on_counting_without_the_time_in_which_nobody_lived(ledger, monkeypatch):
    now = [1_000]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    row = ledger.worker(0)
    row.introduce(1, 1)
    row.beat(Activity.IDLE, 7)
    now[0] += 50
    row.beat(Activity.IDLE)
    assert row.read().counter == 7
    now[0] += 1_000_000  # dead
    row.introduce(2, 2)
    row.beat(Activity.BUSY)
    now[0] += 4
    assert row.read().times_ns(now[0]) == (4, 0, 50)
