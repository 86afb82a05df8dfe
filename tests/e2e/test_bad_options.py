"""run.py refuses bad options with one sentence and exit 2, at once, and leaves nothing behind.

One option of each kind as a process of its own, which shows how long it takes; the others in this process.
"""

import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.small_models import write_small_model
from pipeline.commands.cli import main

RUN = Path(__file__).parent.parent.parent / "run.py"
CPU_SECONDS = 3.0  # of the process itself, so that a busy machine decides nothing


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """Give `headway` arguments in an empty directory, in this process: it refuses them with these parts in its one
    sentence, and makes no file, not even a temporary one.
    """
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)  # main sets it for good
    monkeypatch.setattr("sys.path", list(sys.path))

    def check(*arguments: str, parts: Sequence[str]) -> None:
        before = sorted(here.rglob("*"))
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("headway: ") and err.count("\n") == 1
        for part in parts:
            assert part in err
        assert sorted(here.rglob("*")) == before and list(temporary.iterdir()) == []

    check.here = here
    return check


@pytest.fixture
def call(tmp_path):
    """Run run.py in an empty directory with an empty directory for temporary files; returns the finished process."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()

    def run(*arguments: str, script: Path = RUN) -> subprocess.CompletedProcess:
        environment = os.environ | {"TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=here,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        done.cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert list(temporary.iterdir()) == []
        return done

    run.here = here
    return run


def assert_refused(done, *parts):
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headway: ") and done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr
    assert done.cpu_seconds < CPU_SECONDS


def test_bad_options_are_refused_at_once(call):
    """A mistyped one, a value, and one that needs the model's shape and the free memory."""
    assert_refused(call("--max-stalenes", "2"), "Did you mean --max-staleness?")
    assert_refused(call("--max-staleness", "-1"), "--max-staleness is -1")
    assert_refused(call("--device", "cpu", "--kv-gib", "1e6"), "GiB are free: attention windows 1,250,000 GiB, KV")
    assert list(call.here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--task", "nosuch"], "--task is 'nosuch'"),
        (["--model", "nosuch"], "neither"),
        (["--device", "cuda"], "no NVIDIA GPU"),
        (["--max-context-tokens", "5000"], "--max-context-tokens is 5000, but the model has 1024 positions"),
        (["--mode", "sync", "--max-staleness", "2"], "--max-staleness is 2"),
        (["--env", "my:Env"], "--env is given, but the model tiny"),
        (["--resume", "old"], "no such directory"),
        (["--deterministic"], "isn't built yet"),
        (["--config", "nosuch.toml"], "nosuch.toml"),
        (["--tool-latency", "sometimes"], "--tool-latency is 'sometimes'"),
        (["--steps", "two\nlines"], "whole number"),
        (["--run-dir", "/dev/null/run"], "not a directory"),
    ],
)
def test_bad_option(refuse, arguments, part):
    refuse("run", *arguments, parts=[part])


def cut_shard(directory):
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def widen_tokenizer(directory):
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 312', '"vocab_size": 200'))


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda directory: (directory / "model-00001-of-00002.safetensors").unlink(), "lacks the files model-00001"),
        (cut_shard, "model-00002-of-00002.safetensors"),
        (lambda directory: (directory / "config.json").write_text("{"), "config.json"),
        (widen_tokenizer, "has ids up to 298, but the model's embedding only 200 rows"),
    ],
    ids=["file", "shard", "json", "tokenizer"],
)
def test_model_directory_with_a_fault(refuse, damage, part):
    damage(write_small_model(refuse.here / "model", shards=2))
    refuse("run", "--model", "model", "--device", "cpu", parts=[part])


def test_run_directory_that_holds_a_run(refuse):
    old = refuse.here / "old"
    old.mkdir()
    (old / "events.jsonl").write_text("{}\n")
    refuse("run", "--run-dir", "old", parts=["--run-dir is old", "holds a run already"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["audit", "nosuch"], "holds no events.jsonl"),
        (["audit"], "headway audit RUN_DIR"),
        (["auditt"], "Did you mean audit?"),
        (["report", "x"], "isn't built yet"),
        (["eval"], "headway eval DIR|RUN_DIR"),
        (["eval", "nosuch"], "is 'nosuch'"),
    ],
)
def test_bad_command(refuse, arguments, part):
    refuse(*arguments, parts=[part])


def test_the_console_script_tells_the_version_and_refuses_at_once(call):
    headway = call.here / "headway.py"
    headway.write_text(
        f"import sys\nsys.path.insert(0, {str(RUN.parent)!r})\n"
        "from pipeline.commands.entry import main\nsys.exit(main())"
    )
    assert_refused(call("audit", "nosuch", script=headway), "holds no events.jsonl")
    done = call("--version", script=headway)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("headway 0.")


def test_help_goes_to_stdout_and_starts_nothing(call):
    done = call("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max-staleness N" in done.stdout
    assert list(call.here.iterdir()) == []


def test_a_reader_that_leaves_early_sees_no_stack_trace():
    with subprocess.Popen(
        [sys.executable, str(RUN), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


def test_a_missing_package_is_told_in_one_sentence(tmp_path):
    """What a newcomer sees who runs the script before `make run`: -S hides every installed package."""
    done = subprocess.run([sys.executable, "-S", str(RUN)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not installed; run `make run`" in done.stderr and done.stderr.count("\n") == 1
