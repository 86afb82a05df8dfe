"""What a run has decided so far: the journal's records, added up. The same object serves the run that writes them and
whoever resumes it, so the two can't differ.

A batch's record is written before its step; so the last one may be of a batch that never got its weights. It is
`training` until the next record of a batch, or `finish_batch`, says that it was trained.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.errors import JournalError
from pipeline.journal.record_codec import pack_group, unpack_group
from pipeline.journal.records import Admitted, BatchRecord, GivenUp, Ready, Record
from pipeline.trajectory import Group, Trajectory


@dataclass(slots=True)
class Outstanding:
    """An admitted group whose last result has not come. handed_over: members that came in earlier ones."""

    row: int
    version: int  # at admission
    handed_over: set[int] = field(default_factory=set)


@dataclass(slots=True)
class TrainingNow:
    """A batch whose record is whole, and whose update is not known to be. groups: what it trains, in its order."""

    record: BatchRecord
    groups: list[Group]

    @property
    def trajectories(self) -> dict[tuple[int, int], Trajectory]:
        """By (group, member)."""
        return {(one.group, one.member): one for group in self.groups for one in group.trajectories}


@dataclass(slots=True)
class RunState:
    """version: policy version after `batches` batches. admitted, consumed: groups, since the run's start. given_up:
    groups that are "failed" and "filtered". outstanding: in order of admission. ready: results that no batch has taken,
    in order of completion.
    """

    version: int = 0
    batches: int = 0
    admitted: int = 0
    consumed: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    ready: list[Group] = field(default_factory=list)
    training: TrainingNow | None = None

    @property
    def oldest_owed(self) -> int:
        """The oldest version at which a group was admitted that is not trained yet; the present one if none is left."""
        owed = [one.version for one in self.outstanding.values()] + [group.version for group in self.ready]
        owed += [group.version for group in self.training.groups] if self.training else []
        return min(owed, default=self.version)

    def apply(self, record: Record) -> None:
        """The next record. Raises JournalError for one that can't follow those before it."""
        match record:
            case Admitted():
                if record.group != self.admitted:
                    raise JournalError(f"Group {record.group} is admitted where group {self.admitted} is due.")
                self.admitted += 1
                self.outstanding[record.group] = Outstanding(record.row, record.version)
            case Ready():
                self._add(record.group)
            case BatchRecord():
                self._train(record)
            case GivenUp():
                self._take_outstanding(record.group)
                self.given_up[record.event] += 1

    def finish_batch(self) -> None:
        """The batch that was in training has been trained; does nothing if there is none."""
        if self.training is None:
            return
        self.batches += 1
        self.version += int(self.training.record.updated)
        self.training = None

    def _add(self, result: Group) -> None:
        one = self._take_outstanding(result.group)
        members = set(result.members)
        if members & one.handed_over:
            raise JournalError(f"Group {result.group} hands members {sorted(members & one.handed_over)} over twice.")
        if not result.final:
            one.handed_over |= members
            self.outstanding[result.group] = one
            self.outstanding = dict(sorted(self.outstanding.items()))
        if members:
            self.ready.append(result)
        elif result.final:  # nothing comes after those that came before
            self.consumed += not self._has_ready(result.group)
            self._note_final(result.group)

    def _note_final(self, group: int) -> None:
        """The last result of it that has not been trained, if there is any, turns out to be its last of all: who comes
        later gets no other. Who has been given it already gets the empty one, too, and must not find it changed.
        """
        for results in (self.ready, [] if self.training is None else self.training.groups):
            for index in reversed(range(len(results))):
                if results[index].group == group:
                    noted = [*results[:index], replace(results[index], final=True), *results[index + 1 :]]
                    if results is self.ready:
                        self.ready = noted
                    else:
                        self.training = replace(self.training, groups=noted)
                    return

    def _train(self, record: BatchRecord) -> None:
        self.finish_batch()
        if (record.step, record.version) != (self.batches + 1, self.version):
            raise JournalError(
                f"Batch {record.step} at version {record.version} follows batch {self.batches} at {self.version}."
            )
        members = record.members if record.members is not None else (None,) * len(record.groups)
        groups = [self._take_ready(group, wanted) for group, wanted in zip(record.groups, members, strict=True)]
        self.training = TrainingNow(record, groups)

    def _take_ready(self, group: int, members: tuple[int, ...] | None) -> Group:
        """The members (None: all) of `group`, out of `ready`, as one result."""
        parts = [part for part in self.ready if part.group == group]
        by_member = {one.member: one for part in parts for one in part.trajectories}
        wanted = list(by_member) if members is None else list(members)
        if not wanted or not by_member.keys() >= set(wanted):
            raise JournalError(f"A batch trains members {wanted} of group {group}; ready are {sorted(by_member)}.")
        left = [part if part.group != group else _without(part, wanted) for part in self.ready]
        self.ready = [part for part in left if part.trajectories]
        final = group not in self.outstanding and not self._has_ready(group)
        self.consumed += int(final)
        return replace(parts[-1], trajectories=[by_member[member] for member in wanted], final=final)

    def _has_ready(self, group: int) -> bool:
        return any(part.group == group for part in self.ready)

    def _take_outstanding(self, group: int) -> Outstanding:
        if group not in self.outstanding:
            raise JournalError(
                f"Group {group} is told of, which is not outstanding: never admitted, or complete already."
            )
        return self.outstanding.pop(group)

    # --- on disk -------------------------------------------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint's state.msgpack. No batch is in training then."""
        assert self.training is None, "a state is kept between two batches"
        return {
            "version": self.version,
            "batches": self.batches,
            "admitted": self.admitted,
            "consumed": self.consumed,
            "given_up": dict(self.given_up),
            "outstanding": [
                [group, one.row, one.version, sorted(one.handed_over)] for group, one in self.outstanding.items()
            ],
            "ready": [pack_group(group) for group in self.ready],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "RunState":
        """Inverse of `to_plain`. Raises JournalError for anything else."""
        try:
            return cls(
                version=int(plain["version"]),
                batches=int(plain["batches"]),
                admitted=int(plain["admitted"]),
                consumed=int(plain["consumed"]),
                given_up=Counter({str(name): int(count) for name, count in plain["given_up"].items()}),
                outstanding={
                    int(group): Outstanding(int(row), int(version), {int(member) for member in handed_over})
                    for group, row, version, handed_over in plain["outstanding"]
                },
                ready=[unpack_group(group) for group in plain["ready"]],
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise JournalError(f"A checkpoint's state can't be read: {type(error).__name__}: {error}.") from error


def _without(part: Group, members: Collection[int]) -> Group:
    return replace(part, trajectories=[one for one in part.trajectories if one.member not in members])
