"""What a run's directory holds: the names of its files and folders, each told here alone.

Beside them stall-<time>.json, what every process was at when nothing moved (stalls/). `audit.py` and the benches look
from outside, and have names of their own.
"""

import os
from pathlib import Path

CONFIG = "config.json"  # the resolved configuration, versions and seed
EVENTS = "events.jsonl"  # the audit log (events.py)
METRICS = "metrics.jsonl"  # one line per batch
TRAJECTORIES = "trajectories.jsonl"  # some trajectories of each batch with their conversations (log_trajectories)
EVALUATIONS = "eval.jsonl"  # one line per evaluation, with an evaluator
CHECKPOINTS = "checkpoints"  # weights, optimizer and trainer's state, each one whole (checkpoints/)
JOURNAL = "journal"  # what was decided since: what a resume goes on from (journal/)
ROLLOUTS = "journal/rollouts.msgpack"  # trajectories that are not finished (rollouts/kept_members.py)
BOOKMARK = "journal/log.msgpack"  # how far the audit log was, and what it said (journal/log_bookmark.py)
LOGS = "logs"  # one file per process
LIVE = "live.json"  # while the run goes on: whose it is, locked (run_lock.py)
ENDPOINT = "endpoint.json"  # while the run goes on: where a harness finds its endpoint (endpoint/)

FIRST_JOURNAL_FILE = 0  # its ordinal


def is_run_directory(path: Path | str) -> bool:
    """Whether a run has been there: each begins with its audit log."""
    return os.path.isfile(os.path.join(path, EVENTS))
