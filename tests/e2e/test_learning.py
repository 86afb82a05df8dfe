"""`make soak`: what a user sees when everything works. run.py with its defaults learns the task it is shown with."""

import tempfile
from statistics import mean

import pytest
from run_py import ROOT, RunPy, audit

from pipeline.commands.run_config import task_defaults

RUN_SECONDS = 380.0  # bound on a run, for a busy machine; no result depends on it


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_async_run_learns_with_every_seed(tmp_path, seed):
    options = ("--mode", "async", "--seed", str(seed), "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as temporary:
        run = RunPy(tmp_path / "run", temporary, *options, script=ROOT / "run.py")
        try:
            assert (run.process.wait(timeout=RUN_SECONDS), run.stderr) == (0, "")
        finally:
            run.end()
    rewards = [line["reward/mean"] for line in run.lines("metrics.jsonl")]
    assert len(rewards) == task_defaults("guess")["steps"]
    assert mean(rewards[:10]) <= 0.30
    assert mean(rewards[-20:]) >= 0.70
    assert audit(run.run_dir).returncode == 0
