"""The ledger under random writes against a slow oracle (plain dicts), read through a second, read-only mapping.

A write may also break off: some of the words it changes become visible, others not, as when its writer is killed, or as
another processor may see them for a moment. The reader then gets the record before or after, or an error.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shm import ledger as ledger_module
from shm.block import Block
from shm.errors import LedgerError
from shm.ledger import Activity, Ledger, LedgerShape, SlotState, State

WORDS = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**40)
TORN = object()  # in the oracle: this record can't be read until it is written whole again


class LedgerMachine(RuleBasedStateMachine):
    @initialize(sizes=st.tuples(st.integers(1, 5), st.integers(0, 9), st.integers(1, 4)), run=WORDS)
    def make(self, sizes, run):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ledger_module, "_NAPS", 0)
        self.shape = LedgerShape(*sizes)
        self.block = Block.create("ledger", self.shape.num_bytes, fill=0xFF)
        self.writer = Ledger(self.block.view, self.shape)
        self.writer.format(run)
        self.readers_block = Block.open(self.block.path, self.shape.num_bytes, writable=False)
        self.reader = Ledger(self.readers_block.view, self.shape)
        self.run = run
        self.version = 0
        self.slots = {slot: SlotState(-1, State.EMPTY, 0) for slot in range(self.shape.num_slots)}
        self.leases = dict.fromkeys(range(self.shape.num_slots), 0)
        self.reservations = (0, [])
        self.identities = {index: (0, -1) for index in range(self.shape.num_workers)}
        self.beats = {index: (Activity.STARTING, 0) for index in range(self.shape.num_workers)}

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()
            self.block.close()
            self.readers_block.close()

    def write(self, data, old, new, write):
        """Do `write`, whole or broken off half-way; return what the oracle must then hold for this record."""
        words = self.writer._words
        before = words.tolist()
        write()
        after = words.tolist()
        changed = [index for index in range(len(before)) if before[index] != after[index]]
        # Over a torn record always write whole: half a write could by chance restore the one before it.
        if old is TORN or data.draw(st.integers(0, 3), "0: broken off") > 0:
            return new
        visible = data.draw(st.sets(st.sampled_from(changed)) if changed else st.just(set()), "words visible")
        for index in changed:
            words[index] = after[index] if index in visible else before[index]
        if len(visible) == len(changed):
            return new
        return old if not visible else TORN

    @rule(version=COUNTS)
    def write_policy_version(self, version):
        self.writer.write_policy_version(version)
        self.version = version

    @rule(data=st.data(), version=COUNTS, state=st.sampled_from(State), checksum=COUNTS)
    def write_slot(self, data, version, state, checksum):
        slot = data.draw(st.sampled_from(sorted(self.slots)), "slot")
        new = SlotState(version, state, checksum)
        self.slots[slot] = self.write(
            data, self.slots[slot], new, lambda: self.writer.write_slot(slot, version, state, checksum)
        )

    @rule(data=st.data(), count=COUNTS)
    def write_lease(self, data, count):
        slot = data.draw(st.sampled_from(sorted(self.leases)), "slot")
        self.writer.write_lease(slot, count)
        self.leases[slot] = count

    @rule(data=st.data(), epoch=COUNTS)
    def write_reservations(self, data, epoch):
        pairs = st.tuples(COUNTS, COUNTS)
        owed = data.draw(st.lists(pairs, max_size=self.shape.num_reservations), "owed")
        self.reservations = self.write(
            data, self.reservations, (epoch, owed), lambda: self.writer.write_reservations(epoch, owed)
        )

    @rule(data=st.data(), extra=st.integers(1, 3))
    def write_too_many_reservations(self, data, extra):
        with pytest.raises(LedgerError):
            self.writer.write_reservations(1, [(0, 0)] * (self.shape.num_reservations + extra))

    @rule(data=st.data(), pid=COUNTS, incarnation=COUNTS)
    def introduce(self, data, pid, incarnation):
        index = data.draw(st.sampled_from(sorted(self.identities)), "worker")
        row = self.writer.worker(index)
        row.beat(Activity.STARTING, 0)
        self.beats[index] = (Activity.STARTING, 0)
        self.identities[index] = self.write(
            data,
            self.identities[index],
            (pid, incarnation),
            lambda: self.writer._write(row._start, (pid, incarnation)),
        )

    @rule(data=st.data(), activity=st.sampled_from(Activity), counter=COUNTS)
    def beat(self, data, activity, counter):
        index = data.draw(st.sampled_from(sorted(self.beats)), "worker")
        last = self.writer._words[self.writer.worker(index)._start + 3]
        self.writer.worker(index).beat(activity, counter)
        assert self.writer._words[self.writer.worker(index)._start + 3] >= last
        self.beats[index] = (activity, counter)

    @precondition(lambda self: self.reservations is not TORN)
    @rule(ahead=st.integers(-2, 2))
    def ask_for_an_epoch(self, ahead):
        epoch, owed = self.reservations
        if ahead > 0:
            with pytest.raises(LedgerError, match="or later"):
                self.reader.reservations(epoch + ahead)
        else:
            assert self.reader.reservations(epoch + ahead) == (epoch, owed)

    @invariant()
    def the_reader_sees_what_the_oracle_holds(self):
        if not hasattr(self, "reader"):
            return
        assert self.reader.attach() == self.run
        assert self.reader.policy_version() == self.version
        for slot, expected in self.slots.items():
            self.compare(expected, lambda slot=slot: self.reader.slot(slot))
            assert self.reader.read_lease(slot) == self.leases[slot]
        self.compare(self.reservations, self.reader.reservations)
        for index, expected in self.identities.items():
            self.compare(expected, lambda index=index: self.identity(index))

    def identity(self, index):
        found = self.reader.worker(index).read()
        assert (found.activity, found.counter) == self.beats[index]
        return (found.pid, found.incarnation)

    def compare(self, expected, read):
        if expected is TORN:
            with pytest.raises(LedgerError, match="stayed torn"):
                read()
        else:
            assert read() == expected


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
