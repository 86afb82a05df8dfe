"""What the learner itself knows of the ages in a batch, and the gate that asks it: the bound holds whoever errs."""

import numpy as np

from shm.errors import GateError
from shm.gate import refusal
from shm.ledger import Ledger
from workers.learning.packing import TrainingRows
from workers.messages import OptimStep


class BatchAges:
    """Of the gradients accumulated since `begin`. stale_policy: what the gate refuses (see `RunSpec`)."""

    def __init__(self, groups_per_step: int, max_staleness: int, stale_policy: str) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._stale_policy = stale_policy
        # Of the segments: those whose age the gate judges, and, under mask_span, those that weigh nothing.
        self._trained_versions: set[int] = set()
        self._weightless_versions: set[int] = set()
        self._version = 0  # that these gradients belong to

    def begin(self, version: int) -> None:
        """A batch begins, at `version`."""
        self._trained_versions, self._weightless_versions = set(), set()
        self._version = version

    def add(self, rows: TrainingRows, batch: int, version: int) -> None:
        """Another chunk. Only under mask_span may a segment be too old, and then no token of it may have a place in the
        loss. Raises GateError when `version` is not that of the batch's chunks before.
        """
        if version != self._version:
            raise GateError(
                f"A chunk of batch {batch} came at version {version}, but its first one at version {self._version}; "
                "all chunks of a batch must see the same weights."
            )
        generated = rows.versions >= 0
        trained = generated & (rows.scales != 0) if self._stale_policy == "mask_span" else generated
        self._trained_versions.update(np.unique(rows.versions[trained]).tolist())
        self._weightless_versions.update(np.unique(rows.versions[generated & ~trained]).tolist())

    @property
    def largest(self) -> int:
        """The largest age of what is trained, in updates."""
        return self._version - min(self._trained_versions)

    def pass_gate(self, message: OptimStep, version: int, ledger: Ledger) -> None:
        """Raise GateError unless every segment is young enough, everyone left behind can still train in time, and the
        step is the one from `version`, into a slot that nobody leases.
        """
        if (message.from_version, message.to_version) != (version, version + 1):
            raise GateError(
                f"A step from version {message.from_version} to {message.to_version} was asked for "
                f"at version {version}."
            )
        if ledger.read_lease(message.slot) != 0:
            raise GateError(
                f"Slot {message.slot} is still leased; version {message.to_version} can't be written there."
            )
        _, reservations = ledger.reservations(message.epoch)
        consumed = set(message.groups)
        self._judge(version, [(group, admitted) for group, admitted in reservations if group not in consumed])

    def pass_replay(self, from_version: int, version: int) -> None:
        """The same of an update that was taken once already: who was left behind then is none of its business."""
        if from_version != version:
            raise GateError(f"The update from version {from_version} was to be replayed at version {version}.")
        self._judge(version, [])

    def _judge(self, version: int, left_behind: list[tuple[int, int]]) -> None:
        why = refusal(
            versions=sorted(self._trained_versions),
            weightless=sorted(self._weightless_versions),
            left_behind=left_behind,
            from_version=version,
            groups_per_update=self._groups_per_step,
            max_staleness=None if self._stale_policy == "keep" else self._max_staleness,
        )
        if why is not None:
            raise GateError(why)
