"""Which groups are let in, and which of them train next: a pure state machine over plain integers.

One batch is one round: `admit`, then `receive` and `select` in turn until a batch exists, then `commit`.

    G groups_per_step   K max_staleness   v policy version   n batches done   d = version at admission + K

Under `wait`, every admitted group is owed an update no later than from version d. The k-th oldest of them must satisfy
k <= (d - v + 1)·G, or the updates left would not hold all of them. Hence a batch may be trained only if those left
behind still fit after it: `shm/gate.py`, which the learner asks again on its own. To take the oldest ready groups is
optimal (earliest deadline first: admission order is deadline order), so if that batch fails, no other would pass.
Under `keep` and `mask_span` nothing is owed, and the first results to arrive train first.

A group that failed or was filtered is replaced at once, in mid-batch (`replace`), at the committed version. That keeps
the invariant, even while the learner takes a step that was asked for before: those that stay move up in rank, and the
newcomer, last in rank, has the latest deadline there is. It is number K·G at most of those the step leaves behind,
since no more than T <= (1 + K)·G are ever owed and a full batch takes G of them (a short one takes all that are owed).
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Literal

from pipeline.data.row_order import RowOrder
from pipeline.errors import ConfigError, RunError
from shm.gate import first_blocker, fits

STALE_POLICIES = ("wait", "keep", "mask_span")
BATCH_ORDERS = ("completion", "admission")


class ScheduleError(RunError):
    """The schedule was driven against its rules, or a group would train too old: a bug of ours, never the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRules:
    """All that the schedule depends on. `num_rows`: rows of the dataset; `row_order`: in which order they are admitted
    (None: as they are, and again from the start).
    """

    groups_per_step: int
    group_size: int
    max_staleness: int
    steps: int
    num_rows: int
    stale_policy: Literal["wait", "keep", "mask_span"] = "wait"
    admit_ahead: int = 2
    oversample_factor: float = 1.0
    batch_order: Literal["completion", "admission"] = "completion"
    repeat_dataset: bool = True
    carry_over: bool = False  # groups arrive in parts, and a batch counts trajectories
    row_order: RowOrder | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        counts = (self.groups_per_step, self.group_size, self.steps, self.num_rows)
        if min(counts) < 1 or min(self.max_staleness, self.admit_ahead) < 0 or not self.oversample_factor >= 1:
            raise ConfigError(f"{self} holds a number out of range: no batch could be formed.")
        if self.stale_policy not in STALE_POLICIES or self.batch_order not in BATCH_ORDERS:
            raise ConfigError(f"{self} holds an unknown name; there are {STALE_POLICIES} and {BATCH_ORDERS}.")
        if self.stale_policy != "wait" and not (self.repeat_dataset and self.batch_order == "completion"):
            raise ConfigError(
                f"stale_policy {self.stale_policy!r} trains what arrives first; a finite dataset and batch_order "
                "'admission' need stale_policy 'wait'."
            )
        if self.stale_policy == "wait" and self.carry_over:
            raise ConfigError("stale_policy 'wait' trains whole groups; carry_over needs 'keep' or 'mask_span'.")
        if self.row_order is not None and sum(self.row_order.sizes) != self.num_rows:
            raise ScheduleError(f"The order is one of {sum(self.row_order.sizes)} rows, not of {self.num_rows}.")
        if self.steps > ceil(self.total / self.groups_per_step):
            raise ConfigError(
                f"{self.num_rows} rows, each used once, fill fewer than {self.steps} batches of {self.groups_per_step} "
                "groups; ask for fewer steps or set repeat_dataset."
            )

    @property
    def total(self) -> int:
        """Groups of the whole run, if none is replaced."""
        return self.total_without(0)

    def total_without(self, replaced: int) -> int:
        """Groups that the run trains when `replaced` others were admitted and never trained."""
        wanted = self.steps * self.groups_per_step
        return wanted if self.repeat_dataset else min(wanted, max(0, self.num_rows - replaced))

    @property
    def target(self) -> int:
        """T: how far admission may run ahead of the groups trained."""
        window = (1 + self.max_staleness) * self.groups_per_step
        ahead = (1 + min(self.admit_ahead, self.max_staleness)) * self.groups_per_step
        return min(window, ceil(ahead * self.oversample_factor))


@dataclass(frozen=True, slots=True)
class Admission:
    """Leave to start group `group` on dataset row `row`; no segment of it will be older than `version`."""

    group: int
    row: int
    version: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What trains next. `members`, parallel to `groups`: those of each part; None where groups are whole."""

    groups: tuple[int, ...]
    members: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Blocked:
    """No batch yet. `group`: the oldest group not received, for which the trainer waits (None: nothing is outstanding).

    why: "ready", too few groups were received; "bound", a full batch was, but the staleness bound (or admission order)
    holds it back.
    """

    why: Literal["ready", "bound"]
    group: int | None


class Scheduler:
    """The state of one run's schedule; each call costs at most O(groups in flight)."""

    def __init__(self, rules: ScheduleRules) -> None:
        self.rules = rules
        self._order = rules.row_order or RowOrder([rules.num_rows])
        self.version = 0
        self.batches = 0
        self.admitted = 0  # groups so far
        self.replaced = 0  # of them, those that failed or were filtered
        self._unfinished: dict[int, set[int]] = {}  # admitted, final part not received -> members received in parts
        self._owed: dict[int, int] = {}  # wait only: admitted, not trained -> version at admission, in order
        self._ready: set[int] = set()  # wait only: owed and received
        self._arrived: deque[tuple[int, tuple[int, ...] | None]] = deque()  # keep, mask_span: untrained results

    @classmethod
    def resumed(
        cls,
        rules: ScheduleRules,
        *,
        version: int,
        batches: int,
        admitted: int,
        replaced: int,
        unconsumed: Mapping[int, tuple[int, Collection[int]]],
    ) -> "Scheduler":
        """Where an earlier run stood, none of whose untrained results is received yet: they come once more.

        unconsumed: group -> (version at admission, members that have trained, of a group that came in parts).
        """
        made = cls(rules)
        made.version, made.batches, made.admitted, made.replaced = version, batches, admitted, replaced
        made._unfinished = {group: set(trained) for group, (_, trained) in sorted(unconsumed.items())}
        if rules.stale_policy == "wait":
            made._owed = {group: admitted_at for group, (admitted_at, _) in sorted(unconsumed.items())}
        made._check_invariant()
        return made

    @property
    def finished(self) -> bool:
        """True once every group of the run has had its batch: all steps, or fewer when the data was used up."""
        return self._batch_size() == 0

    @property
    def reserved_groups(self) -> int:
        """Groups owed training; 0 unless `wait`."""
        return len(self._owed)

    @property
    def pending(self) -> int:
        """Results received and not yet trained."""
        return len(self._ready) + len(self._arrived)

    def reservations(self) -> list[tuple[int, int]]:
        """(group, version at admission) of every group owed training, oldest first; empty unless `wait`."""
        return list(self._owed.items())

    def deadline(self, group: int) -> int | None:
        """Last version from which `group` may train; None if it is not owed training."""
        admitted = self._owed.get(group)
        return None if admitted is None else admitted + self.rules.max_staleness

    def admit(self) -> list[Admission]:
        """One round of admission, at the current version; due once at the start of each batch."""
        return self._admit_until(self._admission_limit())

    def replace(self, group: int) -> Admission | None:
        """`group` will never train: it failed, or was filtered before it was received. Returns the one admitted in its
        place; None when the data is used up.
        """
        if self._unfinished.get(group) != set() or self.rules.carry_over:
            raise ScheduleError(f"Group {group} can't be replaced: it isn't outstanding as a whole.")
        del self._unfinished[group]
        self._owed.pop(group, None)
        self.replaced += 1
        # One for one, also between a batch and the next round of admission, which has room for more.
        admissions = self._admit_until(min(self.admitted + 1, self._admission_limit()))
        return admissions[0] if admissions else None

    def _admit_until(self, limit: int) -> list[Admission]:
        rules = self.rules
        new = range(self.admitted, limit)
        admissions = [Admission(group, self._order.row(group), self.version) for group in new]
        for admission in admissions:
            self._unfinished[admission.group] = set()
            if rules.stale_policy == "wait":
                self._owed[admission.group] = self.version
        self.admitted += len(admissions)
        self._check_invariant()
        return admissions

    def receive(self, group: int, members: Sequence[int] | None = None, final: bool = True) -> None:
        """A result was pulled: the whole group (members None) or a part; the group is complete with its final part."""
        seen = self._unfinished.get(group)
        if seen is None:
            raise ScheduleError(
                f"Group {group} was received, but it is not outstanding: never admitted, or complete already."
            )
        if self.rules.stale_policy == "wait":
            if members is not None or not final:
                raise ScheduleError(f"Group {group} arrived in part; under stale_policy 'wait' groups train whole.")
            self._ready.add(group)
        elif members is None:
            self._arrived.append((group, None))
        else:
            part = tuple(members)
            if seen.intersection(part) or len(set(part)) < len(part):
                raise ScheduleError(
                    f"Group {group} delivered members {part}, some of them twice (before: {sorted(seen)})."
                )
            seen.update(part)
            if part:
                self._arrived.append((group, part))
        if final:
            del self._unfinished[group]

    def select(self) -> Batch | Blocked:
        """The batch that may train now, or what holds it back. Changes nothing: `commit` takes the batch."""
        if self.finished:
            total = self.rules.total_without(self.replaced)
            raise ScheduleError(f"All {total} groups have had their batch; there is none to select.")
        return self._select_owed() if self.rules.stale_policy == "wait" else self._select_arrived()

    def pull_counts_as_wait(self) -> bool:
        """Whether a pull begun now waits for the bound: at least G groups are pending, and yet no batch is allowed."""
        if self.rules.stale_policy != "wait" or len(self._ready) < self.rules.groups_per_step:
            return False
        return isinstance(self.select(), Blocked)

    def commit(self, batch: Batch, updated: bool) -> None:
        """`batch` was trained; `updated` is False if it held no gradient, and so left the version as it is."""
        if self.rules.stale_policy == "wait":
            self._take_owed(batch)
        else:
            self._take_arrived(batch)
        self.batches += 1
        self.version += int(updated)
        self._check_invariant()

    def _batch_size(self) -> int:
        left = self.rules.total_without(self.replaced) - self.batches * self.rules.groups_per_step
        return max(0, min(self.rules.groups_per_step, left))

    def _admission_limit(self) -> int:
        """How many groups may have been admitted by now, those replaced included."""
        total = self.rules.total_without(self.replaced)
        return self.replaced + min(total, self.batches * self.rules.groups_per_step + self.rules.target)

    def _blocked(self, why: Literal["ready", "bound"]) -> Blocked:
        return Blocked(why, next(iter(self._unfinished), None))

    def _select_owed(self) -> Batch | Blocked:
        size = self._batch_size()
        if len(self._ready) < size:
            return self._blocked("ready")
        if self.rules.batch_order == "admission":
            chosen = list(islice(self._owed, size))
            if not self._ready.issuperset(chosen):
                return self._blocked("bound")
        else:
            chosen = list(islice((group for group in self._owed if group in self._ready), size))
        if self._blocker_without(chosen) is not None:
            return self._blocked("bound")
        return Batch(tuple(chosen))

    def _blocker_without(self, chosen: Sequence[int]) -> int | None:
        """Rank of a group that could no longer train in time after an update with `chosen`; None: safe."""
        taken = set(chosen)
        left_behind = [admitted for group, admitted in self._owed.items() if group not in taken]
        return first_blocker(left_behind, self.version, self.rules.groups_per_step, self.rules.max_staleness)

    def _take_owed(self, batch: Batch) -> None:
        if len(batch.groups) != self._batch_size() or not self._ready.issuperset(batch.groups):
            raise ScheduleError(
                f"Batch {self.batches + 1} names groups {batch.groups}, which are not {self._batch_size()} ready ones."
            )
        for group in batch.groups:
            age = self.version - self._owed[group]
            if age > self.rules.max_staleness:
                raise ScheduleError(f"Group {group} has age {age}; max_staleness is {self.rules.max_staleness}.")
        if self._blocker_without(batch.groups) is not None:
            raise ScheduleError(
                f"Batch {batch.groups} at version {self.version} would leave a group behind that cannot train in time."
            )
        for group in batch.groups:
            del self._owed[group]
        self._ready.difference_update(batch.groups)

    def _select_arrived(self) -> Batch | Blocked:
        rules = self.rules
        wanted = rules.groups_per_step * (rules.group_size if rules.carry_over else 1)
        groups: list[int] = []
        members: list[tuple[int, ...]] = []
        for group, part in self._arrived:
            if wanted == 0:
                break
            if part is None:
                part = tuple(range(rules.group_size))
            if rules.carry_over:
                part = part[:wanted]
            wanted -= len(part) if rules.carry_over else 1
            groups.append(group)
            members.append(part)
        if wanted and (self._unfinished or self.admitted < self._admission_limit()):
            return self._blocked("ready")
        if not groups:
            raise ScheduleError(
                f"Batch {self.batches + 1} is due, but every result that was admitted has been trained."
            )
        whole = all(len(part) == rules.group_size for part in members)
        return Batch(tuple(groups), None if whole and not rules.carry_over else tuple(members))

    def _take_arrived(self, batch: Batch) -> None:
        everyone = tuple(range(self.rules.group_size))
        parts = batch.members if batch.members is not None else (everyone,) * len(batch.groups)
        for group, taken in zip(batch.groups, parts, strict=True):
            first, part = self._arrived.popleft() if self._arrived else (None, ())
            if part is None:
                part = everyone
            if first != group or part[: len(taken)] != taken:
                raise ScheduleError(
                    f"Batch {batch.groups} does not begin with the oldest results; group {first} came next."
                )
            if len(taken) < len(part):  # a split result: its rest stays at the front
                self._arrived.appendleft((group, part[len(taken) :]))

    def _check_invariant(self) -> None:
        if not fits(list(self._owed.values()), self.version, self.rules.groups_per_step, self.rules.max_staleness):
            raise ScheduleError(
                f"At version {self.version} the owed groups {self.reservations()} no longer fit into the updates left "
                f"(groups_per_step {self.rules.groups_per_step}, max_staleness {self.rules.max_staleness})."
            )
