"""Which slot holds which version: leases keep it, the next version goes where nobody reads."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.errors import RunError
from pipeline.processes.learner.slot_table import SlotTable


@pytest.fixture
def written():
    """What the ledger was told: slot -> leases."""
    return {}


@pytest.fixture
def retired():
    """The versions that it was told nobody holds any more, in order."""
    return []


@pytest.fixture
def table(written, retired):
    """Three slots, version 0 committed in slot 0."""
    table = SlotTable(3, written.__setitem__, retired.append)
    table.published(0, 0)
    return table


def test_leases_are_counted_per_version_and_told_to_the_ledger(table, written):
    assert [table.lease(0), table.lease(0)] == [0, 0]
    assert table.num_leases(0) == 2 and written == {0: 2}
    table.release(0)
    assert table.num_leases(0) == 1 and written == {0: 1}


def test_committed_version_stays_wanted_without_a_lease(table, retired):
    table.lease(0)
    table.release(0)
    assert retired == []  # the next trajectory may lease it


def test_older_version_is_retired_with_its_last_lease(table, retired):
    table.lease(0)
    table.lease(0)
    table.published(1, 1)
    table.release(0)
    assert retired == []
    table.release(0)
    assert retired == [0]


def test_version_that_nobody_holds_is_retired_by_its_successor(table, retired):
    table.published(1, 1)
    assert retired == [0]


def test_next_version_goes_into_an_empty_slot_first_then_over_the_oldest(table):
    assert table.slot_for_next() == 1
    table.published(1, 1)
    assert table.slot_for_next() == 2
    table.published(2, 2)
    assert table.slot_for_next() == 0
    table.published(3, 0)
    assert table.slot_for_next() == 1


def test_leased_and_committed_slots_are_never_named_for_the_next_version(table):
    table.lease(0)
    table.published(1, 1)
    table.lease(1)
    table.published(2, 2)
    assert table.slot_for_next() is None  # 0 and 1 are leased, 2 is committed
    table.release(1)
    assert table.slot_for_next() == 1


def test_a_slot_named_for_the_next_version_is_leased_to_nobody_from_then_on(table):
    table.published(1, 1)
    table.published(2, 2)
    assert table.resident == [0, 1, 2]
    assert table.slot_for_next() == 0
    assert table.resident == [1, 2]
    with pytest.raises(RunError, match="No slot holds version 0"):
        table.lease(0)
    assert table.slot_for_next() == 0  # asked again, it is the same


def test_overwritten_version_is_gone(table):
    table.published(1, 1)
    table.published(2, 0)
    with pytest.raises(RunError, match=r"No slot holds version 0; the slots hold \[2, 1, -1\]"):
        table.lease(0)


def test_writing_over_a_lease_is_an_error(table):
    table.lease(0)
    with pytest.raises(RunError, match="Version 1 was written into slot 0, which 1 still lease"):
        table.published(1, 0)


class Slots(RuleBasedStateMachine):
    """Against an oracle that remembers, for every version ever made, whether it must still be readable."""

    @initialize(num_slots=st.integers(2, 5))
    def begin(self, num_slots):
        self.ledger = {}
        self.retired = []
        self.table = SlotTable(num_slots, self.ledger.__setitem__, self.retired.append)
        self.num_slots = num_slots
        self.table.published(0, 0)
        self.version = 0
        self.place = {0: 0}  # version -> slot, of those not overwritten
        self.leases = {}  # version -> holds

    @rule(back=st.integers(0, 5))
    def lease_a_resident_version(self, back):
        assert sorted(self.table.resident) == sorted(self.place)
        version = sorted(self.place, reverse=True)[back % len(self.place)]
        assert self.table.lease(version) == self.place[version]
        self.leases[version] = self.leases.get(version, 0) + 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_one(self, data):
        version = data.draw(st.sampled_from(sorted(self.leases)))
        self.leases[version] -= 1
        if not self.leases[version]:
            del self.leases[version]
        self.retired.clear()
        self.table.release(version)
        assert self.retired == ([version] if version not in self.leases and version != self.version else [])

    @rule()
    def publish(self):
        slot = self.table.slot_for_next()
        held = {self.place[version] for version in {*self.leases, self.version}}
        if slot is None:
            assert len(held) == self.num_slots
            return
        assert slot not in held
        over = [version for version, place in self.place.items() if place == slot]
        free = [version for version in self.place if version not in self.leases and version != self.version]
        assert over in ([], [min(free)] if free else [])  # an empty one, or that of the oldest
        assert bool(over) == (len(self.place) == self.num_slots)
        for version in over:
            del self.place[version]
        self.version += 1
        self.place[self.version] = slot
        self.retired.clear()
        self.table.published(self.version, slot)
        assert self.retired == ([] if self.version - 1 in self.leases else [self.version - 1])

    @invariant()
    def every_leased_version_is_where_it_was(self):
        assert self.table.committed == self.version
        for version, slot in self.place.items():
            assert self.table.slot_of(version) == slot
            assert self.table.num_leases(version) == self.leases.get(version, 0) == self.ledger.get(slot, 0)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
