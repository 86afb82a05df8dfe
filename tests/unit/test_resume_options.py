"""`--resume RUN_DIR`: which run goes on, with what of its recipe changed, and what is refused."""

import dataclasses
import json
import os
import shutil
import sys
import warnings

import pytest

from pipeline.commands.cli import main
from pipeline.commands.make_run_config import parse
from pipeline.commands.resume import parse_resume
from pipeline.errors import ConfigError
from pipeline.journal.frames import header
from pipeline.journal.run_state import RunState
from pipeline.run_dir.run_directory import make_run_dir, record_changes
from pipeline.run_dir.run_lock import RunLock
from pipeline.training.resumption import find_run, read_resumption
from tests.complete_checkpoints import complete

STARTED_IN = "/somewhere/else"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path


def make_run(path, *options, done=3, end="stopped"):
    """A run directory as a run leaves it that was made with `options`; end None: it was killed."""
    config = parse(["--steps", "5", "--lr", "0.25", *options])
    make_run_dir(str(path), config.to_json() | {"directory": STARTED_IN})
    rows = [json.dumps({"step": n, "model_step": n}) for n in range(1, done + 1)]
    (path / "metrics.jsonl").write_text("".join(row + "\n" for row in rows))
    events = [{"event": "run"}] + ([{"event": "end", "status": end}] if end is not None else [])
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    checkpoint = path / "checkpoints" / f"version-{done}"
    checkpoint.mkdir(parents=True)
    complete(checkpoint)
    return config


def refusal(*arguments):
    with pytest.raises(ConfigError) as error:
        parse_resume(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def everything_in(path):
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()}


def test_a_run_goes_on_by_its_own_recipe(here):
    config = make_run(here / "run", "--seed", "7")
    found = parse_resume(["--resume", "run"])
    assert found.config == dataclasses.replace(config, run_dir="run")
    assert (str(found.run_dir), found.started_in, found.done, found.looks_complete) == ("run", STARTED_IN, 3, False)
    assert sys.path[-1] == STARTED_IN  # the run's modules may lie there


def test_steps_and_max_minutes_may_change(here):
    make_run(here / "run", "--max-minutes", "30")
    found = parse_resume(["--resume=run", "--steps", "9", "--max-minutes", "none"]).config
    assert (found.steps, found.max_minutes, found.trainer.optimizer.lr) == (9, None, 0.25)
    assert parse_resume(["--resume=run"]).config.max_minutes == 30.0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--resume"], ["--resume needs a value"]),
        (["--resume", "run", "--lr", "0.1"], ["--lr can't be given with --resume", "only --steps and --max-minutes"]),
        (["--resume", "run", "--lr", "0.25"], ["--lr can't be given"]),  # the same value, but who knows
        (["--mode", "sync", "--resume", "run"], ["--mode can't be given", "--init run"]),
        (["--resume", "run", "--run-dir", "other"], ["--run-dir can't be given"]),
        (["--resume", "run", "--config", "recipe.toml"], ["--config can't be given"]),
        (["--resume", "run", "--stepps", "3"], ["--stepps is no option", "Did you mean --steps?"]),
        (["--resume", "run", "--steps", "many"], ["--steps is 'many'", "whole number"]),
        (["--resume", "run", "--steps", "0"], ["--steps is 0", "at least 1"]),
        (["--resume", "run", "--max-minutes", "0"], ["--max-minutes is 0.0", "above 0"]),
        (["--resume", "rum"], ["--resume is rum", "no such directory"]),
        (["--resume", "run/config.json"], ["--resume is run/config.json", "no directory"]),
        (["--resume", "run/checkpoints/version-3"], ["holds no run", "did you mean", "/run?"]),
        (["--resume", "."], ["--resume is .", "holds no run"]),
    ],
)
def test_what_can_not_be_is_refused_in_one_sentence(here, arguments, parts):
    make_run(here / "run")
    before = everything_in(here)
    message = refusal(*arguments)
    for part in parts:
        assert part in message
    assert everything_in(here) == before


def test_without_any_checkpoint_there_is_nothing_to_go_on_from(here):
    make_run(here / "run", done=0, end=None)
    shutil.rmtree(here / "run" / "checkpoints" / "version-0")
    assert "run holds no checkpoint to go on from" in refusal("--resume", "run")
    (here / "run" / "checkpoints").rmdir()
    assert "run holds no checkpoint to go on from" in refusal("--resume", "run")


def test_where_every_checkpoint_is_damaged_a_good_copy_of_what_is_named_is_the_remedy(here):
    make_run(here / "run")
    for state in (here / "run" / "checkpoints").glob("version-*/state.msgpack"):
        state.write_bytes(state.read_bytes()[:-1] + b"?")
    message = refusal("--resume", "run")
    assert "its state.msgpack is not what was saved" in message and "put a good copy of that back" in message
    assert "saves its first one" not in message


def test_a_run_without_a_checkpoint_goes_on_if_its_journal_goes_back_to_its_start(here):
    config = make_run(here / "run", done=0)
    shutil.rmtree(here / "run" / "checkpoints")
    (here / "run" / "journal").mkdir()
    for ordinal in range(2):  # it was resumed once, and ended as early
        (here / "run" / "journal" / f"{ordinal:08d}.log").write_bytes(header(ordinal, 0))
    found = parse_resume(["--resume", "run"])
    config = dataclasses.replace(config, run_dir="run")
    assert (found.config, found.done, found.looks_complete) == (config, 0, False)
    with open(here / "run" / "journal" / "00000001.log", "ab") as file:
        file.write(b"what it decided then")
    assert parse_resume(["--resume", "run"]).config == config
    (here / "run" / "journal" / "00000000.log").unlink()
    assert "run holds no checkpoint to go on from" in refusal("--resume", "run")


START_UP = ["a directory", "logs", "half config", "config", "lock", "journal", "events", "half header", "run event"]
RUN_EVENT = {"t": 0.0, "event": "run", "version": 0, "group_size": 4, "on_stragglers": "truncate"}


def start_up(path, last):
    """What is there at each instant of a run's start, in its order, until its first checkpoint is whole."""
    config = parse(["--steps", "5", "--run-dir", str(path)])
    for instant in START_UP[: START_UP.index(last) + 1]:
        match instant:
            case "a directory":
                path.mkdir()
            case "logs":
                (path / "logs").mkdir()
            case "half config":
                (path / "config.json").write_text(json.dumps(config.to_json(), indent=2)[:1000])
            case "config":
                (path / "config.json").unlink()
                make_run_dir(str(path), config.to_json() | {"directory": STARTED_IN})
            case "lock":
                (path / "live.json").write_text('{"pid": 1}')
            case "journal":
                (path / "journal").mkdir()
            case "events":
                (path / "events.jsonl").touch()
                (path / "metrics.jsonl").touch()
            case "half header":
                (path / "journal" / "00000000.log").write_bytes(header(0, 0)[:10])
            case "run event":
                (path / "journal" / "00000000.log").write_bytes(header(0, 0))
                (path / "events.jsonl").write_text(json.dumps(RUN_EVENT) + "\n")
                (path / "checkpoints" / ".tmp-version-0").mkdir(parents=True)
    return config


@pytest.mark.parametrize("last", START_UP[START_UP.index("config") :])
def test_a_run_that_ended_at_any_instant_of_its_start_begins(here, last):
    config = start_up(here / "run", last)
    found = parse_resume(["--resume", "run"])
    assert (found.config.steps, found.started_in, found.done, found.looks_complete) == (5, STARTED_IN, 0, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_run(found.run_dir, config.to_json() | {"directory": STARTED_IN}) == found.run_dir
        resumption = read_resumption(found.run_dir)
    assert (resumption.state, resumption.saved_version) == (RunState(), None)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("a directory", "killed as it began; begin it anew, with --run-dir run."),
        ("logs", "killed as it began; begin it anew, with --run-dir run."),
        ("half config", "killed as it began, nothing of it is to be kept: remove the directory, and begin it anew."),
    ],
)
def test_of_one_that_ended_before_a_word_says_what_to_do(here, last, told):
    start_up(here / "run", last)
    assert told in refusal("--resume", "run")
    if last != "half config":
        make_run_dir("run", {"config": {}})  # as it says


def test_a_lost_journal_is_no_run_that_never_began(here):
    start_up(here / "run", "run event")
    shutil.rmtree(here / "run" / "journal")
    assert "run holds no checkpoint to go on from" in refusal("--resume", "run")


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (b"", ["is no configuration of a run"]),
        (b"[]", ["is no configuration of a run"]),
        (b'{"config": 3}', ["is no configuration of a run"]),
        (b'{"config": {"class": "TrainerConfig"}}', ["Python script", "trainer.run(rows, steps, resume='run')"]),
        (b'{"config": {"class": "EvalConfig"}}', ["config is", "RunConfig"]),
    ],
)
def test_config_json_of_something_else_is_refused(here, record, parts):
    make_run(here / "run")
    (here / "run" / "config.json").write_bytes(record)
    message = refusal("--resume", "run")
    for part in parts:
        assert part in message


def test_a_run_that_goes_on_is_refused_naming_its_process(here):
    """Also when all its steps are trained: it may be saving."""
    make_run(here / "run", done=5, end=None)
    with RunLock(here / "run"):
        before = everything_in(here)
        assert f"run belongs to a run that goes on (process {os.getpid()})" in refusal("--resume", "run")
        assert everything_in(here) == before
    assert parse_resume(["--resume", "run"]).done == 5


def test_what_a_resume_changes_is_recorded_and_nothing_else(here):
    config = make_run(here / "run", "--max-minutes", "30")
    found = parse_resume(["--resume", "run", "--steps", "9", "--max-minutes", "none"]).config
    before = json.loads((here / "run" / "config.json").read_text())
    record_changes(here / "run", found.to_json() | {"python": "4.0", "directory": "/another"})
    after = json.loads((here / "run" / "config.json").read_text())
    assert (after["config"].pop("steps"), after["config"].pop("max_minutes")) == (9, None)
    assert (before["config"].pop("steps"), before["config"].pop("max_minutes")) == (5, 30.0)
    assert after == before
    assert parse_resume(["--resume", "run"]).config == dataclasses.replace(
        config, steps=9, max_minutes=None, run_dir="run"
    )
    unchanged = everything_in(here)
    record_changes(here / "run", found.to_json())
    assert everything_in(here) == unchanged
    record_changes(here / "run", {"config": {"class": "TrainerConfig"}})  # of the Python API, which records no steps
    assert everything_in(here) == unchanged


def change(path, field, value):
    """Set `config.<field>` of the run's config.json, or take it out (value: KeyError)."""
    record = json.loads((path / "config.json").read_text())
    part, (*outer, name) = record["config"], field.split(".")
    for key in outer:
        part = part[key]
    if value is KeyError:
        del part[name]
    else:
        part[name] = value
    (path / "config.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("trainer.optimizer.lr", KeyError, ["config.trainer.optimizer.lr is missing", "--init run"]),
        ("trainer.optimizer.momentum", 0.9, ["config.trainer.optimizer.momentum is unknown"]),
        ("trainer.optimizer.lr", "fast", ["config.trainer.optimizer.lr is 'fast'"]),
        ("trainer.optimizer.lr", -1.0, ["can't be used any more", "lr is -1.0"]),
        ("trainer.optimizer", {"class": "Muon"}, ["config.trainer.optimizer is"]),
        ("model", "[" * 9000, ["task is 'guess'", "model is [[[", "… ", "or leave the model out"]),
        ("samplers", True, ["config.samplers is True"]),
        ("device", "cuda", ["cuda", "no NVIDIA GPU"]),
    ],
)
def test_a_recipe_that_this_version_or_machine_can_not_follow_is_refused_naming_the_field(here, field, value, parts):
    make_run(here / "run")
    change(here / "run", field, value)
    message = refusal("--resume", "run")
    for part in parts:
        assert part in message
    assert len(message) < 3000


@pytest.mark.parametrize(
    ("run", "steps", "is_complete"),
    [
        ({"done": 5, "end": "completed"}, [], True),
        ({"done": 5, "end": "completed"}, ["--steps", "3"], True),
        ({"done": 5, "end": "completed"}, ["--steps", "6"], False),
        ({"done": 5, "end": "stopped"}, [], True),  # while it ended
        ({"done": 5, "end": None}, [], False),  # its last checkpoint is to be made
        ({"done": 5, "end": "failed"}, [], False),  # the same: it could not be
        ({"done": 4, "end": "stopped"}, ["--steps", "4"], True),
        ({"done": 4, "end": "stopped"}, [], False),
    ],
)
def test_a_run_with_nothing_left_to_train_says_so_and_changes_nothing(here, capsys, run, steps, is_complete):
    """HR66: not a wait without end, and no new version."""
    make_run(here / "run", **run)
    before = everything_in(here)
    if not is_complete:
        assert parse_resume(["--resume", "run", *steps]).looks_complete is False
        return
    assert main(["run", "--resume", "run", *steps]) == 0
    output = capsys.readouterr()
    asked = steps[-1] if steps else "5"
    assert output.out == (
        f"nothing to do: run has trained {run['done']} steps, and {asked} are asked for; to train on, ask for more by "
        "--steps.\n"
    )
    assert output.err == "" and everything_in(here) == before


def test_a_stop_in_the_last_evaluation_leaves_that_to_do(here):
    make_run(here / "run", "--eval-every", "2", done=5, end="stopped")
    assert parse_resume(["--resume", "run"]).looks_complete is False


@pytest.mark.parametrize("log", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize(
    "torn", [b'{"step": 5, "model_st', b"\0" * 64 + b"1.5}\n", b"\0" * 64], ids=["beginning", "end", "nothing"]
)
def test_what_a_death_left_torn_does_not_count(here, log, torn):
    """The end of a line, too, whose beginning a power failure took: all of it is cut when the run goes on."""
    make_run(here / "run", done=4, end="stopped")
    with open(here / "run" / log, "ab") as file:
        file.write(torn)
    found = parse_resume(["--resume", "run", "--steps", "4"])
    assert (found.done, found.looks_complete) == (4, True)


def test_a_last_line_that_tells_of_no_step_is_damage(here):
    make_run(here / "run")
    with open(here / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": "four", "model_step": 4}\n')
    assert "metrics.jsonl is damaged: its last line tells of no step; restore it." in refusal("--resume", "run")
