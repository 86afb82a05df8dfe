"""`python -m bench.sync_overlap`: that it runs, compares like with like, and says so in one line of JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import sync_overlap
from bench.errors import BenchError

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    *("--pairs", "1", "--steps", "2", "--tool-latency", "none", "--device", "cpu"),
    *("--groups-per-step", "4", "--group-size", "4", "--overlap-min-sequences", "4"),
]


def bench(*arguments):
    command = [sys.executable, "-m", "bench.sync_overlap", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def test_it_prints_a_ratio_and_the_same_as_json():
    done = bench(*SMALL)
    assert (done.returncode, done.stderr.count("pair 1: ours")) == (0, 1), done.stderr
    heading, table, line = done.stdout.splitlines()
    assert heading.startswith("sync_overlap  4 x 4 trajectories a batch, chunks of 4 rows")
    result = json.loads(line)
    assert result["ratio"] == pytest.approx(result["peer_ms"] / result["ours_ms"])
    assert f"ratio {result['ratio']:.2f}x   median of 1 pairs" in table
    assert result["options"]["overlap_min_sequences"] == 4


def test_bad_options_are_one_sentence():
    for arguments, sentence in ((["--pairs", "0"], "--pairs is 0"), (["--tool-latency", "x"], "--tool-latency is 'x'")):
        done = bench(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_arms_that_train_different_batches_end_the_bench():
    same = dict.fromkeys(sync_overlap.SAME, 1.0)
    sync_overlap.check_same(same, dict(same))
    with pytest.raises(BenchError, match="reward/mean is 1.0 against 1.5"):
        sync_overlap.check_same(same, same | {"reward/mean": 1.5})
