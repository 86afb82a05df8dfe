"""Results that have come from the rollouts and have not been trained yet, whole groups or parts of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.schedule import Batch
from pipeline.trajectory import Group, Trajectory


@dataclass(slots=True)
class _Untrained:
    """What is here of one group. `latest`: its last result, whose facts (seconds, deadline) count for the group."""

    latest: Group
    members: dict[int, Trajectory] = field(default_factory=dict)


class Received:
    """Untrained trajectories by group; a group is forgotten once its last one has gone into a batch."""

    def __init__(self) -> None:
        self._untrained: dict[int, _Untrained] = {}

    def __len__(self) -> int:
        """Groups with trajectories that wait to be trained."""
        return sum(1 for one in self._untrained.values() if one.members)

    def add(self, result: Group) -> None:
        one = self._untrained.setdefault(result.group, _Untrained(result))
        one.latest = result
        one.members.update({trajectory.member: trajectory for trajectory in result.trajectories})
        self._forget_if_consumed(one)

    def groups(self, batch: Batch) -> list[Group]:
        """The batch's results, in its order: copies of each group with the members that the batch takes."""
        found = []
        for group, members in zip(batch.groups, _members(batch), strict=True):
            one = self._untrained[group]
            taken = list(one.members.values()) if members is None else [one.members[member] for member in members]
            latest = one.latest
            found.append(
                Group(group, latest.row, latest.version, taken, latest.final, latest.closed_by_deadline, latest.seconds)
            )
        return found

    def consume(self, batch: Batch) -> None:
        """The batch's trajectories train now, and never again."""
        for group, members in zip(batch.groups, _members(batch), strict=True):
            one = self._untrained[group]
            for member in list(one.members) if members is None else members:
                del one.members[member]
            self._forget_if_consumed(one)

    def _forget_if_consumed(self, one: _Untrained) -> None:
        if one.latest.final and not one.members:
            del self._untrained[one.latest.group]


def _members(batch: Batch) -> Sequence[tuple[int, ...] | None]:
    return batch.members if batch.members is not None else [None] * len(batch.groups)
