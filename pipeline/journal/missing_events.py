"""Which events the audit log lacks of what the journal has: those that a death came before. Pure.

A record is written before its event, and what leads to it (segments, the ends of trajectories) is with the system
before the record. So after a kill only the last record's own event can be missing. After a power failure more can,
and the records tell nearly all of it; what nobody knows any more (which sampler, how many seconds) is null.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.errors import JournalError
from pipeline.journal.log_state import LogState, segments_of
from pipeline.journal.records import Admitted, BatchRecord, GivenUp, Ready, Record, events_of
from pipeline.trajectory import Trajectory

LOST = "the log's end was lost"  # why a trajectory has less to show than the log says, and ends

Event = tuple[str, dict[str, Any]]


def missing_events(log: LogState, records: Iterable[Record], num_told: int, num_steps: int) -> Iterator[Event]:
    """(event, fields) in the order in which they are to be appended; each goes into `log`, too.

    records: the journal from some file on, of whose events the log has the first `num_told`. num_steps: steps that are
    complete (metrics.jsonl has their rows), whose updates the log must tell. Raises JournalError if log and journal
    are not of one run.
    """
    completion = _Completion(log)
    for record in records:
        events = events_of(record)
        for event, key in events:
            num_told -= 1
            if num_told == 0 and log.last_decision != (event, key):
                raise _of_different_runs(log, event, key)
            if num_told < 0:
                completion.add_decision(record, event)
        if not events and num_told <= 0 and isinstance(record, Ready):
            completion.discard_stragglers(record)
        yield from completion.take()
    if log.batches <= num_steps:
        completion.end_update()
        yield from completion.take()


class _Completion:
    """The events that are found missing, as `take` gives them out."""

    def __init__(self, log: LogState) -> None:
        self._log = log
        self._found: list[Event] = []

    def take(self) -> list[Event]:
        found, self._found = self._found, []
        return found

    def add_decision(self, record: Record, event: str) -> None:
        """An event that a record stands for, and what must come before it."""
        match record:
            case Admitted():
                self._reach(record.version)
                named = {} if record.id is None else {"id": record.id}
                self._add(event, group=record.group, row=record.row, version=record.version, **named)
            case Ready():
                self._forget_others(record)
                for trajectory in record.group.trajectories:
                    self._complete(trajectory)
                self.discard_stragglers(record)
                self._add(event, group=record.group.group)
            case BatchRecord():
                self._reach(record.version)
                self._add(event, **batch_fields(record))
            case GivenUp() if event == "ready":  # it was filtered, and whole
                for member in range(self._log.group_size):
                    self._end(record.group, member)
                self._add(event, group=record.group)
            case GivenUp():
                tokens = self._log.groups[record.group].unspent_tokens  # no more than the log has
                self._add(event, group=record.group, cause=record.cause, tokens=tokens)

    def discard_stragglers(self, record: Ready) -> None:
        """After a group's last part nothing of it runs any more."""
        group = record.group.group
        if not (record.group.final and self._log.discards_stragglers and group in self._log.groups):
            return
        for number in range(self._log.group_size):
            member = self._log.member(group, number)
            if member.state in ("new", "running"):
                self._add("discarded", **_name(group, number), cause="group_discard", tokens=member.tokens)

    def _forget_others(self, record: Ready) -> None:
        """A part takes all that have ended by then; what else the log tells to have ended had started again."""
        group, part = record.group.group, set(record.group.members)
        for number, member in list(self._log.groups[group].members.items()):
            if member.state == "ended" and number not in part:
                self._retry(group, number)

    def end_update(self) -> None:
        """The last batch's update was whole."""
        log = self._log
        if log.due == "optim":
            self._add("optim", step=log.batches, **{"from": log.version, "to": log.version + 1}, seconds=None)
        if log.due:
            self._add("published", version=log.version + 1, slot=None, bytes=None, seconds=None)

    def _reach(self, version: int) -> None:
        """What comes next happened at `version`, so it was published."""
        if self._log.version < version:
            self.end_update()
        if self._log.version < version:
            raise JournalError(
                f"The journal tells of version {version}, but after batch {self._log.batches} the log is at version "
                f"{self._log.version}. They are not of one run, or one was changed; put both files back as they were."
            )

    def _complete(self, trajectory: Trajectory) -> None:
        """All that the log lacks of a trajectory that has ended."""
        group, number = trajectory.group, trajectory.member
        member = self._log.member(group, number)
        wanted = segments_of(trajectory)
        if member.state == "ended" and member.segments == wanted:
            return
        kept_to = member.pinned is None or all(version == member.pinned for version, _, _ in wanted)
        if member.state == "ended" or not kept_to or wanted[: len(member.segments)] != member.segments:
            self._retry(group, number)
        self._start(group, number)
        for version, kv_version, tokens in wanted[len(member.segments) :]:
            self._reach(version)
            unknown = dict.fromkeys(("cached", "sampler", "seconds"))
            own = {"version": version, "kv_version": kv_version, "tokens": tokens}
            self._add("segment", **_name(group, number), **own, **unknown)
        tokens, reward = trajectory.generated_tokens, trajectory.reward
        self._add("trajectory", **_name(group, number), tokens=tokens, reward=reward, truncated=trajectory.truncated)

    def _end(self, group: int, number: int) -> None:
        """A trajectory has ended; nobody knows any more how, if the log does not."""
        member = self._log.member(group, number)
        if member.state not in ("new", "running"):
            return
        self._start(group, number)
        self._add("trajectory", **_name(group, number), tokens=member.tokens, reward=None, truncated=LOST)

    def _retry(self, group: int, number: int) -> None:
        member = self._log.member(group, number)
        self._add("retry", **_name(group, number), attempt=member.attempt + 1, cause=LOST, tokens=member.tokens)

    def _start(self, group: int, number: int) -> None:
        if self._log.member(group, number).state == "new":
            self._add("started", **_name(group, number), version=None, sampler=None)

    def _add(self, event: str, **fields: Any) -> None:
        self._log.apply({"t": self._log.seconds, "event": event} | fields)
        self._found.append((event, fields))


def batch_fields(record: BatchRecord) -> dict[str, Any]:
    """Of a `batch` event."""
    fields = {"step": record.step, "version": record.version, "groups": list(record.groups)}
    fields |= {name: getattr(record, name) for name in ("tokens", "masked", "dropped", "age_min", "age_max", "updated")}
    return fields | ({} if record.members is None else {"members": [list(part) for part in record.members]})


def _name(group: int, member: int) -> dict[str, Any]:
    return {"trajectory": f"{group}.{member}", "group": group}


def _of_different_runs(log: LogState, event: str, key: int) -> JournalError:
    told = "nothing" if log.last_decision is None else "{} {}".format(*log.last_decision)
    return JournalError(
        f"As event {log.num_decisions} of the run's decisions the log tells {told}, and the journal {event} {key}. "
        "They are not of one run, or one of them was changed; put both files back as they were."
    )
