"""docs/recovery.md as a user follows it: a run is ended by its time, resumed, audited; and the same from Python.

The clock and `--steps` are the test's, so that nothing lasts eight hours.
"""

import re

import pytest

from pipeline import audit
from pipeline.commands import launch
from pipeline.commands.options import OPTIONS
from pipeline.commands.time_limit import END_SECONDS, TimeLimit
from tests.e2e import page_runner
from tests.e2e.run_py import RunFiles
from tests.kept_processes import KEPT

PAGE = page_runner.read_page("recovery.md")


@pytest.fixture
def checkout(kept, tmp_path):
    page_runner.make_checkout(tmp_path)
    return tmp_path


class Clock:
    """Stands still until a run has trained its second batch; by then almost eight hours have passed."""

    now = 0.0

    def __call__(self):
        return self.now


def test_the_shell_block(checkout, monkeypatch):
    ((_, block),) = page_runner.blocks(PAGE, "sh")
    train, *others = block.splitlines(keepends=True)
    clock, show = Clock(), launch.Progress.show

    def show_and_jump(progress, n, metrics):
        show(progress, n, metrics)
        if n == 2:
            clock.now = 480 * 60 - END_SECONDS

    with monkeypatch.context() as patch:
        patch.setattr(launch, "TimeLimit", lambda minutes: TimeLimit(minutes, clock))
        patch.setattr(launch.Progress, "show", show_and_jump)
        code, out, err = KEPT.command(checkout, "run", *train.split()[2:], "--groups-per-step", "2")
    assert (code, err) == (143, "")
    run = RunFiles(checkout / "runs" / "night")
    done = len(run.lines("metrics.jsonl"))
    assert done >= 2 and run.events("end")[-1]["status"] == "stopped"
    assert "--max-minutes 480 are nearly over: the run saves, and ends" in out.splitlines()
    assert "to go on: python run.py --resume runs/night" in out.splitlines()
    versions = {event["version"] for event in run.events("published")}
    assert run.events("checkpoint")[-1]["version"] == max(versions, default=0)

    resume, prove = others
    out = page_runner.follow(f"{resume.rstrip()} --steps {done + 1} --max-minutes none\n{prove}", "sh", checkout)
    assert f"completed after {done + 1} of {done + 1} steps, 1 of them since the resume, in " in out
    assert "0 findings" in out
    assert len(run.lines("metrics.jsonl")) == done + 1


def test_the_python_block(checkout):
    ((_, block),) = page_runner.blocks(PAGE, "python")
    assert page_runner.follow(block, "python", checkout).split() == ["4", "5"]
    assert audit.main(str(checkout / "runs" / "mine" / "events.jsonl")) == 0


def test_the_page_names_options_that_there_are():
    flags = {option.flag for option in OPTIONS.values()} | {"--resume"}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named and named <= flags, named - flags
