"""A run's audit log and its journal brought together again after a death: the journal is the truth.

A log that lacks events gets them. One that tells of what the journal does not know (a power failure may keep the one
and lose the other) is cut off there: nothing was done upon it.
"""

import os
from pathlib import Path

from pipeline.errors import JournalError
from pipeline.journal.journal_files import cut_torn_end, events_before, read
from pipeline.journal.log_bookmark import read_bookmark
from pipeline.journal.log_state import DECISIONS, LogState
from pipeline.journal.missing_events import missing_events
from pipeline.run_dir.json_lines import JsonLines, cut_torn_tail, read_lines
from pipeline.run_dir.run_files import EVENTS, JOURNAL


def complete_log(run_dir: str | os.PathLike[str], num_steps: int) -> LogState:
    """Mend RUN_DIR/events.jsonl and the journal's end, and return what the log now says. Whoever calls owns the run.

    num_steps: steps that are complete, as metrics.jsonl has them. Raises JournalError for damage that no death
    explains, and RunError when the disk is full; to call it again is safe.
    """
    path = Path(run_dir) / EVENTS
    num_decisions = cut_torn_end(Path(run_dir) / JOURNAL)
    begins = events_before(run_dir)
    cut_torn_tail(path)
    log = _read_log(path, num_decisions)
    if not begins:
        return log  # the run died before its journal began
    first = max((ordinal for ordinal, events in begins.items() if events <= log.num_decisions), default=None)
    if first is None:
        raise JournalError(
            f"{path} tells of {log.num_decisions} decisions, and what is left of the journal begins with number "
            f"{min(begins.values()) + 1}: the log lost more than that can tell again. Put back a good copy of it."
        )
    lines = JsonLines(path)
    try:
        told = log.num_decisions - begins[first]
        for event, fields in missing_events(log, read(run_dir, first), told, num_steps):
            lines.write({"t": log.seconds, "event": event} | fields)
        lines.sync()
    finally:
        lines.close()
    return log


def _read_log(path: Path, num_decisions: int) -> LogState:
    """Cut the log off before its first event that the journal does not know."""
    start, log = read_bookmark(path.parent, num_decisions)
    cut = None
    for begins, event in read_lines(path, start):
        try:
            if cut is None and event["event"] in DECISIONS and log.num_decisions == num_decisions:
                cut = begins
            if cut is None:
                log.apply(event)
            elif event["event"] in ("optim", "published"):
                raise JournalError(
                    f"{path} tells at byte {begins} of an update that the journal knows nothing of; but a batch's "
                    "record is on the disk before its update. Files of the journal were lost; put them back."
                )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise JournalError(
                f"{path} has an event at byte {begins} that can't follow what comes before it "
                f"({type(error).__name__}: {error}): {event!r:.200}. Put back a good copy of the file."
            ) from error
    if cut is not None:
        os.truncate(path, cut)
    return log
