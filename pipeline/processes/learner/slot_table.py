"""Which slot holds which policy version, who leases it, and where the next version goes. Pure but for two callbacks.

The supervisor alone gives leases and picks the slot of the next update, so the two can't race: a slot that is named for
the next version is forgotten at once, so that nobody is given a lease on what it holds.
"""

import asyncio
from collections.abc import Callable, Mapping

from pipeline.errors import RunError

EMPTY = -1


class SlotTable:
    """Leases per version; `write_lease(slot, count)` mirrors them into the ledger, where the learner checks them.

    retired(version) is called when nobody holds a version that is not the committed one: most likely nobody ever will
    (only a trajectory that moves on by segments may still come to it).
    """

    def __init__(self, num_slots: int, write_lease: Callable[[int, int], None], retired: Callable[[int], None]) -> None:
        self.num_slots = num_slots
        self._versions = [EMPTY] * num_slots
        self._leases = [0] * num_slots
        self._write_lease = write_lease
        self._retired = retired
        self.committed = EMPTY
        self.lease_returned = asyncio.Event()  # for who waits for a free slot; set by what ends the wait, too

    def published(self, version: int, slot: int) -> None:
        """`version` is now READY in `slot`, and the committed one."""
        if self._leases[slot]:
            raise RunError(f"Version {version} was written into slot {slot}, which {self._leases[slot]} still lease.")
        before, self.committed = self.committed, version
        self._versions[slot] = version
        if before != EMPTY:
            self._retire_unless_held(before)

    def restored(self, slots_of: Mapping[int, int], committed: int) -> None:
        """In a run that begins with several versions: where they are READY, and which is the committed one."""
        for version, slot in slots_of.items():
            self._versions[slot] = version
        self.committed = committed

    @property
    def held(self) -> dict[int, int]:
        """The slots of the versions that somebody leases, and of the committed one, by version."""
        return {
            version: slot
            for slot, version in enumerate(self._versions)
            if version != EMPTY and (self._leases[slot] or version == self.committed)
        }

    def forget_unheld(self) -> None:
        """The slots' memory is gone; who leases a version will find it there again, and nobody else any other."""
        held = self.held
        self._versions = [version if version in held else EMPTY for version in self._versions]

    def slot_of(self, version: int) -> int:
        """Raises RunError when no slot holds `version` any more."""
        try:
            return self._versions.index(version)
        except ValueError:
            raise RunError(f"No slot holds version {version}; the slots hold {self._versions}.") from None

    @property
    def resident(self) -> list[int]:
        """The versions that can be leased."""
        return [version for version in self._versions if version != EMPTY]

    @property
    def leased(self) -> list[int]:
        """The versions that somebody holds."""
        return [version for version, count in zip(self._versions, self._leases, strict=True) if count]

    def lease(self, version: int) -> int:
        """One more hold on `version`; returns its slot."""
        slot = self.slot_of(version)
        self._leases[slot] += 1
        self._write_lease(slot, self._leases[slot])
        return slot

    def release(self, version: int) -> None:
        """Give one hold back."""
        slot = self.slot_of(version)
        self._leases[slot] -= 1
        self._write_lease(slot, self._leases[slot])
        self.lease_returned.set()
        self._retire_unless_held(version)

    def num_leases(self, version: int) -> int:
        return self._leases[self.slot_of(version)]

    def slot_for_next(self) -> int | None:
        """The unleased slot of the oldest version but the committed one, leased to nobody from now on.

        None when all are leased.
        """
        free = [
            (version, slot)
            for slot, version in enumerate(self._versions)
            if self._leases[slot] == 0 and (version == EMPTY or version != self.committed)
        ]
        if not free:
            return None
        slot = min(free)[1]
        self._versions[slot] = EMPTY
        return slot

    def _retire_unless_held(self, version: int) -> None:
        if self.num_leases(version) == 0 and version != self.committed:
            self._retired(version)
