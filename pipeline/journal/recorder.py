"""What a run decides goes through here: first into the journal, then into the audit log, and added up in `state`.

In this order, so that after a kill the log may lack what the journal has, never the other way round.
"""

from pipeline.journal.journal_files import Journal
from pipeline.journal.missing_events import batch_fields
from pipeline.journal.records import Admitted, BatchRecord, GivenUp, Ready, Record
from pipeline.journal.run_state import RunState
from pipeline.run_dir.events import EventLog
from pipeline.schedule import Admission
from pipeline.trajectory import Group


class Recorder:
    """state: that of the run so far, which each decision moves on."""

    def __init__(self, journal: Journal, events: EventLog, state: RunState | None = None) -> None:
        self.state = RunState() if state is None else state
        self._journal = journal
        self._events = events

    def admitted(self, admission: Admission, row_id: str | int | None) -> None:
        """A group is let in; from now on it is owed training. row_id: of its row, if it has one."""
        group, row, version = admission.group, admission.row, admission.version
        self._record(Admitted(group, row, version, row_id))
        named = {} if row_id is None else {"id": row_id}
        self._events.log("admitted", group=group, row=row, version=version, **named)

    def ready(self, result: Group) -> None:
        """A group, or a part of it, may train."""
        self._record(Ready(result))
        if result.trajectories:
            self._events.log("ready", group=result.group)

    def given_up(self, event: str, group: int, cause: str, tokens: int, *, was_ready: bool = False) -> None:
        """A group never trains; event: "failed" or "filtered". was_ready: all of it had been sampled."""
        self._record(GivenUp(event, group, cause, tokens))
        if was_ready:
            self._events.log("ready", group=group)
        self._events.log(event, group=group, cause=cause, tokens=tokens)

    def batch(self, record: BatchRecord) -> None:
        """A batch counts from here on: when this returns its record is on disk."""
        self._record(record)
        try:
            self._journal.sync()
        finally:  # the record counts, whether or not the disk has it for certain
            self._events.log("batch", **batch_fields(record))

    def next_file(self) -> int:
        """Go on in the journal's next file, and return its ordinal. Earlier files may then go (with the checkpoints
        before this one), so the log must have for good what they tell of.
        """
        self._events.sync()
        return self._journal.begin()

    def _record(self, record: Record) -> None:
        self._events.flush()
        self._journal.append(record)
        self.state.apply(record)
