"""`headway eval`: its line and its files, in this process; and Ctrl-C as a user presses it."""

import json

import pytest
from run_py import ROOT, SMALL, RunPy, wait_until_gone


@pytest.fixture(scope="module")
def run_dir(kept, tmp_path_factory):
    """A run of two steps on the tiny model."""
    directory = tmp_path_factory.mktemp("eval")
    options = ("--steps", "2", "--seed", "4", *SMALL, "--device", "cpu", "--run-dir", "run")
    code, _, err = kept.command(directory, "run", *options)
    assert (code, err) == (0, "")
    return directory / "run"


def test_a_runs_checkpoint_is_measured_in_one_line(kept, run_dir):
    options = ("--device", "cpu", "--eval-rows", "8", "--run-dir", "measured")
    code, out, err = kept.command(run_dir.parent, "eval", "run", *options)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("reward ")]
    assert len(lines) == 1 and "±" in lines[0]
    assert "32 trajectories on 8 held-out rows of guess, version 2 of" in lines[0]
    measured = run_dir.parent / "measured"
    (result,) = [json.loads(line) for line in (measured / "eval.jsonl").read_text().splitlines()]
    assert f"reward {result['reward_mean']:.4f} ± {result['reward_stderr']:.4f}" in lines[0]
    config = json.loads((measured / "config.json").read_text())
    assert (config["config"]["seed"], config["config"]["version"]) == (4, 2)
    assert config["model"]["weights"] == str(run_dir / "checkpoints" / "version-2")
    assert kept.command(run_dir.parent, "audit", "measured")[0] == 0


def test_ctrl_c_ends_it_in_order(run_dir):
    script = run_dir.parent / "headway.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pipeline.commands.entry import main; sys.exit(main())"
    )
    slow = ("--tool-latency", "fixed:60000")  # no trajectory ends before the signal
    measuring = RunPy(
        run_dir.parent / "stopped",
        str(run_dir.parent),
        *("eval", "run", "--device", "cpu", *slow, "--run-dir", "stopped"),
        script=script,
    )
    try:
        workers = measuring.wait_for_workers()
        measuring.press_ctrl_c()
        assert measuring.wait() == 130
        wait_until_gone(workers.values(), 10.0)
    finally:
        measuring.end()
    assert measuring.stderr == "" and "stopped without a result" in measuring.stdout
    assert [event["status"] for event in measuring.events("end")] == ["stopped"]
