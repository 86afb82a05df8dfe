"""The comparison of both modes, tiny: real runs, both audited, JSON as the last line; and its help."""

import json
import subprocess
import sys
from pathlib import Path

from bench import async_vs_sync
from pipeline import audit

ROOT = Path(__file__).parent.parent.parent


def test_tiny_comparison(kept, tmp_path, capsys):
    options = ("--steps", "4", "--seeds", "1", "--eval-games", "16", "--tool-latency", "fixed:5")
    with kept.serve():
        assert async_vs_sync.COMMAND.main([*options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["modes"] == {
        "sync": {"max_staleness": 0, "concurrency": 64},
        "async": {"max_staleness": 2, "concurrency": 192},
    }
    (pair,) = report["seeds"]
    for mode, oldest in (("sync", 0), ("async", 2)):
        arm = pair[mode]
        assert arm["steps"] == 4 and arm["age_max"] <= oldest
        assert arm["ideal_steps_per_second"] > 0 and arm["generated_tokens_per_second"] > 0
        assert 0 < arm["learner_busy_frac"] < 1 and 0 < arm["trajectory_work_frac"] <= 1
        assert arm["final_evaluation"]["trajectories"] == 16 and arm["final_evaluation"]["version"] == 4
        assert audit.main(str(tmp_path / f"{mode}-0" / "events.jsonl")) == 0
    assert pair["async"]["age_max"] > 0
    ratio = pair["async"]["steps_per_second"] / pair["sync"]["steps_per_second"]
    assert pair["steps_per_second_ratio"] == ratio == report["summary"]["steps_per_second_ratio"]["median"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["async-0", "sync-0"]


def test_help_explains_options_and_definitions():
    command = [sys.executable, "-m", "bench.async_vs_sync", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("--steps", "--seeds", "--tool-latency", "--eval-games", "--max-staleness", "--out", "ideal"):
        assert word in done.stdout
