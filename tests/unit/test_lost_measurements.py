"""What a resume makes of a run's measurements: lost ones are told of, and damaged ones never guessed."""

import json

import pytest

from pipeline.errors import JournalError, RunError
from pipeline.journal.journal_files import Journal
from pipeline.journal.records import BatchRecord
from pipeline.training.resumption import read_resumption
from pipeline.user_warnings import RunWarning

STEPS = 4


def batch(step):
    """One of nothing, which leaves the version as it is."""
    nothing = {"chunks": (), "tokens": 0, "masked": 0, "dropped": 0, "age_min": 0, "age_max": 0}
    return BatchRecord(
        step=step, version=0, groups=(), members=None, updated=False, lr=0.1, gradient_scale=1.0, **nothing
    )


@pytest.fixture
def run_dir(tmp_path):
    """Of a run that was killed in its batch number STEPS."""
    journal = Journal(tmp_path)
    journal.begin()
    for step in range(1, STEPS + 1):
        journal.append(batch(step))
    journal.close()
    start = {"event": "run", "t": 0, "version": 0, "group_size": 2, "on_stragglers": "truncate"}
    (tmp_path / "events.jsonl").write_text(json.dumps(start) + "\n")
    return tmp_path


def write_metrics(run_dir, steps):
    lines = [json.dumps({"step": step, "model_step": 0}) + "\n" for step in steps]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def test_a_batch_without_its_line_is_taken_again_if_it_is_the_last(run_dir):
    write_metrics(run_dir, [1, 2, 3])
    state = read_resumption(run_dir).state
    assert state.batches == 3 and state.training.record.step == STEPS


def test_lines_that_were_lost_before_are_told_of(run_dir):
    write_metrics(run_dir, [1])
    with pytest.warns(RunWarning, match="lacks the lines of 2 batches, from 2 to 3: they were trained"):
        assert read_resumption(run_dir).state.batches == 3


def test_lines_of_batches_that_the_journal_lacks_are_no_torn_end(run_dir):
    """A record is on the disk before its batch trains: so the journal has lost some."""
    write_metrics(run_dir, range(1, STEPS + 2))
    with pytest.raises(JournalError, match=r"tells of 5 batches, but the journal of 4: files of it were lost"):
        read_resumption(run_dir)


@pytest.mark.parametrize("steps", [[1, 2, 2], [1, 3, 2], [0, 1], ["1"]])
def test_lines_out_of_order_are_refused(run_dir, steps):
    write_metrics(run_dir, steps)
    with pytest.raises(RunError, match=r"metrics.jsonl has a line at byte \d+ that can't follow batch \d"):
        read_resumption(run_dir)


@pytest.mark.parametrize("line", [{"version": 1}, {"row_rewards": 3}, {"row_rewards": [], "what": 1}])
def test_a_line_that_tells_of_no_evaluation_is_refused(run_dir, line):
    write_metrics(run_dir, [1, 2, 3])
    (run_dir / "eval.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RunError, match=r"eval.jsonl has a line at byte 0 that tells of no evaluation"):
        read_resumption(run_dir)
