"""What a run's audit log says, added up event by event: how far each trajectory is, what was trained, what is next.

Only what is outstanding is kept, so it stays small however long the log is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pipeline.trajectory import Trajectory

# Events that a record of the journal stands behind; `events_of` says which.
DECISIONS = frozenset({"admitted", "ready", "batch", "failed", "filtered"})

# new: it has yet to start, perhaps again. ended: it waits for its group. ready: it may train.
MemberState = Literal["new", "running", "ended", "ready", "consumed", "discarded"]
_STATES = get_args(MemberState)


@dataclass(slots=True)
class LoggedMember:
    """A trajectory in its present attempt; `attempt` counts how often it has started again, failures: how often of them
    because it had failed.

    pinned: the policy version that it is told to keep to, if any. segments: (version, kv_version, tokens) of each that
    is not empty.
    """

    state: MemberState = "new"
    pinned: int | None = None
    attempt: int = 0
    failures: int = 0
    segments: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Generated in this attempt, and not accounted for by another event yet."""
        return sum(tokens for _, _, tokens in self.segments)

    def tells_all_of(self, trajectory: Trajectory) -> bool:
        """Whether the log has just the segments of `trajectory`, in this attempt."""
        return self.segments == segments_of(trajectory)


@dataclass(slots=True)
class LoggedGroup:
    """An admitted group of which something is left to train."""

    row: int
    version: int  # at admission
    members: dict[int, LoggedMember] = field(default_factory=dict)

    @property
    def unspent_tokens(self) -> int:
        """Generated, and neither trained nor thrown away."""
        return sum(one.tokens for one in self.members.values() if one.state in ("running", "ended", "ready"))


@dataclass(slots=True)
class LogState:
    """seconds: `t` of the last event. num_runs: `run` events: what the next one says in `resumed`. status: of the `end`
    event, if the latest run has one. version: the newest that was published. batches: `batch` events. due: what
    the last of them still lacks. admitted: groups. num_decisions: events that the journal stands behind, and the last
    of them with its group or step. groups: those outstanding.
    """

    seconds: float = 0.0
    num_runs: int = 0
    status: str | None = None
    version: int = 0
    batches: int = 0
    due: Literal["", "optim", "published"] = ""
    admitted: int = 0
    num_decisions: int = 0
    last_decision: tuple[str, int] | None = None
    groups: dict[int, LoggedGroup] = field(default_factory=dict)
    group_size: int = 0
    discards_stragglers: bool = False

    def member(self, group: int, member: int) -> LoggedMember:
        """What is told of a trajectory that has not been handed over, of an admitted group.

        A group may be outstanding in the journal alone: when its last members were discarded and it died before its
        last, empty part.
        """
        one = self.groups.get(group)
        return LoggedMember("discarded") if one is None else one.members.setdefault(member, LoggedMember())

    def copy(self) -> "LogState":
        """One that goes on by itself."""
        return LogState.from_plain(self.to_plain())

    def to_plain(self) -> list[Any]:
        """As plain values, for a file."""
        groups = [
            [
                number,
                group.row,
                group.version,
                [
                    [key, one.state, one.pinned, one.attempt, one.failures, list(one.segments)]
                    for key, one in group.members.items()
                ],
            ]
            for number, group in self.groups.items()
        ]
        return [*(getattr(self, name) for name in _PLAIN), self.last_decision, groups]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> "LogState":
        """Raises ValueError or TypeError for what `to_plain` can't have made."""
        *values, last, groups = plain
        for (name, kinds), value in zip(_PLAIN.items(), values, strict=True):
            if type(value) not in kinds:
                raise TypeError(f"{name} can't be {value!r:.40}")
        if last is not None and [type(one) for one in last] != [str, int]:
            raise TypeError(f"a decision can't be {last!r:.40}")
        state = cls(**dict(zip(_PLAIN, values, strict=True)), last_decision=None if last is None else tuple(last))
        if not math.isfinite(state.seconds):
            raise ValueError(f"seconds can't be {state.seconds}")
        for number, row, version, members in groups:
            _require_ints(number, row, version)
            group = state.groups[number] = LoggedGroup(row, version)
            for key, stage, pinned, attempt, failures, segments in members:
                _require_ints(key, attempt, failures, 0 if pinned is None else pinned)
                found = [(version, kv_version, tokens) for version, kv_version, tokens in segments]
                _require_ints(*(number for one in found for number in one))
                if stage not in _STATES:
                    raise ValueError(f"a trajectory's state can't be {stage!r:.40}")
                group.members[key] = LoggedMember(stage, pinned, attempt, failures, found)
        return state

    def apply(self, event: Mapping[str, Any]) -> None:
        """The next event. Raises KeyError, TypeError or ValueError for one that lacks something, or can't come here."""
        kind = event["event"]
        self.seconds = float(event["t"])
        if kind in DECISIONS:
            self.num_decisions += 1
            self.last_decision = kind, event["step" if kind == "batch" else "group"]
        match kind:
            case "run":
                self.num_runs += 1
                self.status = None
                self.version = event["version"]
                self.group_size = event["group_size"]
                self.discards_stragglers = event["on_stragglers"] == "discard"
            case "admitted":
                self.groups[event["group"]] = LoggedGroup(event["row"], event["version"])
                self.admitted += 1
            case "started":
                member = self._member(event)
                member.state, member.pinned, member.segments = "running", event["version"], []
            case "segment":
                if event["tokens"]:
                    segment = event["version"], event["kv_version"], event["tokens"]
                    self._member(event).segments.append(segment)
            case "trajectory":
                self._member(event).state = "ended"
            case "ready":
                for member in self.groups[event["group"]].members.values():
                    member.state = "ready" if member.state == "ended" else member.state
            case "retry":
                member = self._member(event)
                member.state, member.attempt, member.segments = "new", event["attempt"], []
                member.failures = event.get("failures", member.failures)
            case "discarded":
                self._spend(event["group"], [self._member(event)], "discarded")
            case "failed" | "filtered":
                del self.groups[event["group"]]
            case "batch":
                self._train(event)
            case "optim":
                self.due = "published"
            case "published":
                self.version, self.due = event["version"], ""
            case "end":
                self.status = event["status"]
                if self.status == "failed":  # whoever resumes it has seen why: what has failed gets all its tries
                    for one in [member for group in self.groups.values() for member in group.members.values()]:
                        one.failures = 0

    def _member(self, event: Mapping[str, Any]) -> LoggedMember:
        members = self.groups[event["group"]].members
        return members.setdefault(int(event["trajectory"].partition(".")[2]), LoggedMember())

    def _train(self, event: Mapping[str, Any]) -> None:
        self.batches = event["step"]
        self.due = "optim" if event["updated"] else ""
        parts = event.get("members", [None] * len(event["groups"]))
        for group, part in zip(event["groups"], parts, strict=True):
            members = self.groups[group].members
            ready = [one for one in members.values() if one.state == "ready"]
            self._spend(group, ready if part is None else [members[member] for member in part], "consumed")

    def _spend(self, group: int, members: list[LoggedMember], state: Literal["consumed", "discarded"]) -> None:
        for member in members:
            member.state, member.segments = state, []
        everyone = self.groups[group].members.values()
        if sum(one.state in ("consumed", "discarded") for one in everyone) == self.group_size:
            del self.groups[group]


# The fields of a LogState that are plain values themselves, in their order in a file, and what each may be.
_PLAIN = {
    "seconds": (float,),
    "num_runs": (int,),
    "status": (str, type(None)),
    "version": (int,),
    "batches": (int,),
    "due": (str,),
    "admitted": (int,),
    "num_decisions": (int,),
    "group_size": (int,),
    "discards_stragglers": (bool,),
}


def _require_ints(*values: Any) -> None:
    if any(type(value) is not int for value in values):
        raise TypeError(f"{values!r:.80} are not all whole numbers")


def segments_of(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    """What the log tells of a trajectory's segments, without empty ones."""
    return [
        (span.version, span.kv_version, len(span.tokens))
        for span in trajectory.spans
        if span.kind == "generated" and span.tokens
    ]
