"""events.jsonl, the audit log: what the supervisor admitted, sampled, trained and lost, one JSON object a line.

Every event has a fixed set of fields, so that anyone can replay the log and prove the staleness bound without trusting
the code that wrote it (`audit.py` does).
"""

import os
from collections.abc import Callable
from typing import Any

from pipeline.run_dir.json_lines import JsonLines

# Fields of each event beside `t` and `event`.
FIELDS: dict[str, str] = {
    "run": "mode max_staleness stale_policy on_stragglers groups_per_step group_size admit_ahead oversample_factor "
    "concurrency steps version",
    "admitted": "group row version",
    "started": "trajectory group version sampler",
    "segment": "trajectory group version kv_version tokens cached sampler seconds",
    "tool": "trajectory group name seconds error",
    "trajectory": "trajectory group tokens reward truncated",
    "ready": "group",
    "batch": "step version groups tokens masked dropped age_min age_max updated",
    "optim": "step from to seconds",
    "published": "version slot bytes seconds",
    "wait": "step seconds group trajectory why detail",
    "retry": "group trajectory attempt cause tokens",
    "discarded": "group trajectory cause tokens",
    "filtered": "group cause tokens",
    "failed": "group cause tokens",
    "evaluation": "version rows status reward_mean",
    "restart": "worker pid cause",
    "checkpoint": "version path seconds",
    "end": "status steps admitted consumed filtered failed outstanding",
}
OPTIONAL: dict[str, str] = {"run": "resumed", "admitted": "id", "batch": "members", "retry": "failures", "end": "cause"}

STANDING_STILL = ("wait", "restart", "retry")

FLUSH_SECONDS = 1.0  # events that are older go to the system with the next one

_REQUIRED = {event: frozenset(names.split()) for event, names in FIELDS.items()}
_ALLOWED = {event: names | frozenset(OPTIONAL.get(event, "").split()) for event, names in _REQUIRED.items()}


class EventLog:
    """The writer of events.jsonl. `t` counts seconds from the run's start and never goes back."""

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float], seconds: float = 0.0):
        """clock: monotonic seconds; seconds: since the run's start, as the last event of a run that is resumed says."""
        self._lines = JsonLines(path)
        self._clock = clock
        self._start = clock() - seconds
        self._last = seconds
        self._flushed = 0.0
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self.num_moves = 0  # events that tell of something done, not of a wait or a loss

    def log(self, event: str, /, **fields: Any) -> None:
        """Append one event, with exactly the fields that it has. `from` is a Python word: pass `**{"from": 3}`."""
        lacking, surplus = _REQUIRED[event] - fields.keys(), fields.keys() - _ALLOWED[event]
        assert not lacking and not surplus, f"event {event!r} lacks {sorted(lacking)}, has {sorted(surplus)} too many"
        now = self.seconds()
        self.num_moves += event not in STANDING_STILL
        line = {"t": now, "event": event} | fields
        before = self.num_bytes
        try:
            self._lines.write(line)
        finally:
            if self.num_bytes > before:  # also if the disk is full: it is written with the next one, then
                for follow in self._followers:
                    follow(line)
        if now - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def follow(self, apply: Callable[[dict[str, Any]], None]) -> None:
        """Have `apply` told each event from here on, as a reader of the file would find it."""
        self._followers.append(apply)

    @property
    def num_bytes(self) -> int:
        """Of the file after the next `flush`."""
        return self._lines.num_bytes

    def seconds(self) -> float:
        """Seconds since the run's start, in microseconds' steps, at least those of the last event."""
        self._last = max(self._last, round(self._clock() - self._start, 6))
        return self._last

    def flush(self) -> None:
        """Hand the events so far to the system, so that a reader (or an audit after a kill) sees them."""
        self._flushed = self._last
        self._lines.flush()

    def sync(self) -> None:
        """Wait until the events so far are on the disk: some milliseconds."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()
