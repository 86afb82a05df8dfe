"""`python -m bench.sync_overlap`: that it runs, compares like with like, and says so in one line of JSON."""

import json

import pytest

from bench import sync_overlap
from bench.errors import BenchError

SMALL = [
    *("--pairs", "1", "--steps", "2", "--tool-latency", "none", "--device", "cpu"),
    *("--groups-per-step", "4", "--group-size", "4", "--overlap-min-sequences", "4"),
]


def test_it_prints_a_ratio_and_the_same_as_json(kept, capsys):
    with kept.serve():
        code = sync_overlap.COMMAND.main(SMALL)
    out, err = capsys.readouterr()
    assert (code, err.count("pair 1: ours")) == (0, 1), err
    heading, table, line = out.splitlines()
    assert heading.startswith("sync_overlap  4 x 4 trajectories a batch, chunks of 4 rows")
    result = json.loads(line)
    assert result["ratio"] == pytest.approx(result["peer_ms"] / result["ours_ms"])
    assert f"ratio {result['ratio']:.2f}x   median of 1 pairs" in table
    assert result["options"]["overlap_min_sequences"] == 4


def test_bad_options_are_one_sentence(capsys):
    for arguments, sentence in ((["--pairs", "0"], "--pairs is 0"), (["--tool-latency", "x"], "--tool-latency is 'x'")):
        assert sync_overlap.COMMAND.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and sentence in err and err.count("\n") == 1


def test_arms_that_train_different_batches_end_the_bench():
    same = dict.fromkeys(sync_overlap.SAME, 1.0)
    sync_overlap.check_same(same, dict(same))
    with pytest.raises(BenchError, match="reward/mean is 1.0 against 1.5"):
        sync_overlap.check_same(same, same | {"reward/mean": 1.5})
