"""`--resume RUN_DIR`: runs that were stopped or completed go on, or say that there is nothing to do.

One that was killed is resumed by test_run_py.py, test_random_resumes.py, and at many instants by
tests/process/test_resumed_runs.py.
"""

import json
import shutil
import sys

import pytest

import pipeline.commands.resume
import pipeline.trainer
from tests.e2e.run_py import SMALL, RunFiles, check_whole
from tests.kept_processes import KEPT


@pytest.fixture
def run(kept, tmp_path):
    return RunFiles(tmp_path / "run")


def train(run, *options):
    """`headway run` of a small new run, in this process."""
    return KEPT.command(run.run_dir.parent, "run", *SMALL, "--device", "cpu", "--run-dir", str(run.run_dir), *options)


def resume(run, *options, directory=None):
    return KEPT.command(directory or run.run_dir.parent, "run", "--resume", str(run.run_dir), *options)


def everything_in(path):
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()}


def test_a_completed_run_trains_on_when_more_steps_are_asked_for(run):
    """HR66: and says that there is nothing to do when they are not, changing nothing."""
    assert train(run, "--steps", "3")[0] == 0
    before = everything_in(run.run_dir)
    for options in ([], ["--steps", "3"], ["--steps", "2"]):
        code, out, err = resume(run, *options)
        assert (code, out.partition(":")[0], err) == (0, "nothing to do", "")
    assert everything_in(run.run_dir) == before

    code, out, err = resume(run, "--steps", "5")
    assert (code, err) == (0, ""), err
    assert "completed after 5 of 5 steps, 2 of them since the resume, in " in out
    check_whole(run, steps=5, resumed=1)
    code, out, err = resume(run)  # what a resume has changed stays so
    assert (code, out) == (0, f"nothing to do: {run.run_dir} has trained 5 steps, and 5 are asked for; to train on, "
                              "ask for more by --steps.\n")  # fmt: skip


def test_a_run_that_ended_before_its_first_checkpoint_goes_on(run):
    code, out, err = train(run, "--steps", "2", "--max-minutes", "0.001")
    assert (code, err) == (143, "") and run.events("checkpoint") == []
    assert f"to go on: python run.py --resume {run.run_dir}" in out.splitlines()
    assert resume(run)[0] == 143  # as short of time
    code, _, err = resume(run, "--max-minutes", "none")
    assert (code, err) == (0, ""), err
    check_whole(run, steps=2, resumed=2)
    assert run.events("checkpoint")[0]["version"] == 0


def test_a_run_that_was_killed_behind_its_first_file_begins(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.trainer, "RunLock", lambda directory: sys.exit(9))
        with pytest.raises(SystemExit):
            train(run, "--steps", "1")
    assert sorted(path.name for path in run.run_dir.iterdir()) == ["config.json", "logs"]
    code, out, err = resume(run)
    assert (code, err) == (0, "") and "completed after 1 of 1 steps" in out
    check_whole(run, steps=1, resumed=0)
    monkeypatch.setattr(pipeline.commands.resume, "looks_complete", lambda *_, **options: False)
    code, out, _ = resume(run)  # now the trainer alone notices
    assert (code, out.partition(",")[0]) == (0, f"nothing to do: {run.run_dir} has trained 1 steps")


def test_the_runs_own_modules_are_found_from_any_directory(run, tmp_path):
    (tmp_path / "my_resumed_losses.py").write_text("def simple(p, q, a, mask, ages):\n    return -a * p\n")
    options = ("--loss", "custom", "--loss-function", "my_resumed_losses:simple")
    assert train(run, "--steps", "1", *options)[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = RunFiles(elsewhere / "moved")
    shutil.move(run.run_dir, moved.run_dir)
    code, _, err = resume(moved, "--steps", "2", directory=elsewhere)
    assert (code, err) == (0, ""), err
    check_whole(moved, steps=2, resumed=1)


def test_a_changed_data_file_is_refused_naming_the_rows(run):
    """What the options say is the same; what they stand for is not."""
    assert train(run, "--steps", "1")[0] == 0
    record = run.record()
    record["rows"]["digest"] = "sha256:0"
    (run.run_dir / "config.json").write_text(json.dumps(record))
    before = everything_in(run.run_dir)
    code, _, err = resume(run, "--steps", "2")
    assert code == 2 and "The training rows are not those that the run began with" in err
    assert everything_in(run.run_dir) == before
