"""Kill a run at random instants of an epoch, and resume it: each row is trained exactly once, and nothing is lost."""

import math
import random
import sys
import tempfile
import uuid
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from bench.small_models import write_small_model
from bench.soak.__main__ import audit_findings
from bench.soak.errands import write_rows
from bench.soak.replay import Replay
from bench.soak.run_options import GROUPS_PER_STEP, run_options
from bench.soak.strikes import Strike
from bench.soak.struck_run import StruckRun

NUM_ROWS = 40
LAST_INSTANT = 4  # rows before the end of the epoch: one batch is left then, which no kill comes too late for
READY, BATCH = b'"event": "ready"', b'"event": "batch"'
LINES_PER_ROW = 100  # of the log, at most, from one such event to the next
PATIENCE_SECONDS = 100.0  # bound on the wait for the end after the last kill


def kills(count, seed, num_rows):
    """Strikes at random instants of an epoch, by `rows_done`; every second one hits the supervisor."""
    draws = random.Random(seed)
    instants = sorted(draws.uniform(0.0, num_rows - LAST_INSTANT) for _ in range(2 * count))
    for number, (before, instant) in enumerate(pairwise([0.0, *instants])):
        yield Strike("kill_supervisor" if number % 2 else "kill", instant - before, 0.0, draws.random())


def rows_done(log):
    """How far an epoch is, in rows: those that are sampled and those that are trained count half, and what the log has
    told since for a part of one.
    """
    if not log.exists():
        return 0.0
    text = log.read_bytes()
    since = text.count(b"\n", max(0, text.rfind(READY), text.rfind(BATCH)))
    return (text.count(READY) + GROUPS_PER_STEP * text.count(BATCH) + min(0.99, since / LINES_PER_ROW)) / 2


def check_epoch(directory, way, recovery, num_rows, num_resumes, seed, processes):
    """An epoch with so many resumes at random instants, in each of which a worker had just been killed, too."""
    data, ledger, run_dir = directory / "rows.jsonl", directory / "ledger.jsonl", directory / "run"
    write_rows(str(data), num_rows)
    model = write_small_model(directory / "model")
    arguments = {"ledger": str(ledger), "hang": 0.0, "recovery": recovery}
    options = run_options(way, model, data, num_rows, arguments, processes)
    log = run_dir / "events.jsonl"
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        run = StruckRun(run_dir, uuid.uuid4().hex, Path(temporary), options)
        try:
            struck = kills(num_resumes, seed, num_rows)
            completed = run.run(struck, math.inf, PATIENCE_SECONDS, clock=partial(rows_done, log))
        finally:
            run.end()
        assert not run.violations and completed, (run.violations, run.exits, run.struck)
        assert list(Path(temporary).iterdir()) == [], "left behind"
    assert run.exits["killed"] == num_resumes
    replay = Replay(run.directory, ledger, num_rows)
    assert replay.violations == []
    assert replay.counts["rows_trained_once"] == num_rows
    assert audit_findings(run.directory) == []


@pytest.mark.timeout(300)
def test_killed_and_resumed(tmp_path):
    """Again and again: test_killed_and_resumed_twenty_times, and tests/process/test_resumed_runs.py."""
    seed = random.randrange(sys.maxsize)
    check_epoch(tmp_path, "async", "snapshot", num_rows=12, num_resumes=1, seed=seed, processes=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("way", "recovery"), [("async", "drop"), ("sync", "snapshot"), ("ahead", "stateless")])
def test_killed_and_resumed_twenty_times(tmp_path, way, recovery):
    check_epoch(tmp_path, way, recovery, NUM_ROWS, num_resumes=20, seed=random.randrange(sys.maxsize), processes=2)
