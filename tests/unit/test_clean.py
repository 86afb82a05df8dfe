"""`headway clean`: what killed runs have left goes, and is told; what lives, or is kept, or is others', stays."""

import os
import shutil
import tempfile

import pytest

from pipeline.commands import clean as clean_module
from pipeline.commands.cli import main
from pipeline.run_dir.run_files import LIVE
from pipeline.run_dir.run_lock import RunLock
from workers.processes.sockets import Swept


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current directory, and the only place for temporary files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("workers.processes.sockets.places", lambda: [str(tmp_path)])
    return tmp_path


def make_run(path, *, killed):
    """A run's directory with a checkpoint; of one that was killed, with what it left."""
    (path / "checkpoints" / "version-4").mkdir(parents=True)
    (path / "journal").mkdir()
    for name in ("events.jsonl", "metrics.jsonl", "config.json"):
        (path / name).write_text("{}\n")
    if killed:
        (path / "journal" / ".tmp-rollouts.msgpack").write_bytes(b"half")
        (path / "checkpoints" / ".tmp-version-6").mkdir()
        (path / "checkpoints" / ".tmp-version-6" / "model.safetensors").write_bytes(b"half")
        for name in (LIVE, "endpoint.json", "endpoint.part"):
            (path / name).write_text("{}")
    return path


def everything(path):
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_leftovers_of_killed_runs_are_removed_and_told(here, capsys):
    complete, killed = (make_run(here / "runs" / name, killed=name == "killed") for name in ("complete", "killed"))
    (here / "runs" / "notes").mkdir()
    (here / "runs" / "notes" / "endpoint.json").write_text("mine")
    assert main(["clean"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "removed runs/killed/journal/.tmp-rollouts.msgpack (a file that was not finished)",
        "removed runs/killed/checkpoints/.tmp-version-6 (a checkpoint that was not finished)",
        "removed runs/killed/endpoint.json (where an endpoint was)",
        "removed runs/killed/endpoint.part (where an endpoint was)",
        "removed runs/killed/live.json (of a run that was killed)",
    ]
    assert everything(killed) == everything(complete)
    assert (here / "runs" / "notes" / "endpoint.json").exists()  # no run's directory
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == "Nothing was left by runs that were killed.\n"


def test_a_run_that_goes_on_is_left_alone(here, capsys):
    lives = make_run(here / "runs" / "lives", killed=True)
    before = everything(lives)
    with RunLock(lives):
        assert main(["clean"]) == 0
        assert capsys.readouterr().out == "Nothing was left by runs that were killed.\n"
        assert main(["clean", "runs/lives"]) == 0
        assert f"left runs/lives alone: its run goes on (process {os.getpid()})" in capsys.readouterr().out
        assert everything(lives) == before


def test_runs_are_named_when_they_lie_elsewhere(here, capsys):
    make_run(here / "runs" / "other", killed=True)
    named = make_run(here / "away", killed=True)
    assert main(["clean", str(named)]) == 0
    assert everything(named) == everything(make_run(here / "fresh", killed=False))
    assert (here / "runs" / "other" / "endpoint.json").exists()
    assert all(str(named) in line for line in capsys.readouterr().out.splitlines())


def test_sockets_and_processes_of_killed_runs_are_told(capsys, monkeypatch):
    swept = [Swept("/tmp/headway-1", 0), Swept("/tmp/headway-2", 3)]
    monkeypatch.setattr(clean_module, "sweep_all", lambda: swept)
    assert main(["clean"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "removed /tmp/headway-1 (sockets of a run that was killed)",
        "removed /tmp/headway-2 (sockets of a run that was killed, and 3 of its processes were ended)",
    ]


def test_reports_of_our_own_errors_go_and_nothing_that_only_looks_like_one(here, capsys, monkeypatch):
    report, other = here / "headway-error-123.txt", here / "headway-error-notes.txt"
    for path in (report, other):
        path.write_text("Traceback")
    (here / "headway-error-4.txt").symlink_to(other)
    with monkeypatch.context() as another:
        another.setattr(os, "getuid", lambda: 4711)  # root sees all that lies there
        assert main(["clean"]) == 0
    assert capsys.readouterr().out == "Nothing was left by runs that were killed.\n" and report.exists()
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == f"removed {report} (a report of an error)\n"
    assert other.exists() and (here / "headway-error-4.txt").is_symlink()


def test_what_can_not_be_removed_is_told_and_the_rest_goes(here, capsys, monkeypatch):
    killed = make_run(here / "runs" / "killed", killed=True)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert main(["clean"]) == 1
    said = capsys.readouterr().out
    assert "can't remove runs/killed/checkpoints/.tmp-version-6: Operation not permitted\n" in said
    assert not (killed / "endpoint.json").exists() and not (killed / LIVE).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--all"], "headway clean has no option --all; it takes run directories."),
        (
            ["nowhere"],
            "nowhere holds no events.jsonl; name the directories of runs, or nothing to mean those in runs/.",
        ),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(capsys, arguments, said):
    assert main(["clean", *arguments]) == 2
    assert capsys.readouterr().err == f"headway: {said}\n"


def test_help_tells_what_is_removed(capsys):
    assert main(["clean", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: headway clean [RUN_DIR…]\n")
