"""run.py refuses bad options with one sentence and exit 2, at once, and leaves nothing behind."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_models import write_small_model

RUN = Path(__file__).parent.parent.parent / "run.py"
CPU_SECONDS = 3.0  # of the process itself, so that a busy machine decides nothing


@pytest.fixture
def call(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-staleness", "-1"], "--max-staleness is -1"),
        (["--max-stalenes", "2"], "Did you mean --max-staleness?"),
        (["--task", "nosuch"], "--task is 'nosuch'"),
        (["--model", "nosuch"], "neither"),
        (["--device", "cpu", "--kv-gib", "1e6"], "GiB are free: attention windows 1,250,000 GiB, KV caches"),
        (["--device", "cuda"], "no NVIDIA GPU"),
        (["--max-context-tokens", "5000"], "--max-context-tokens is 5000, but the model has 1024 positions"),
        (["--mode", "sync", "--max-staleness", "2"], "--max-staleness is 2"),
        (["--env", "my:Env"], "--env is given, but the model tiny"),
        (["--resume", "old"], "isn't built yet"),
        (["--config", "nosuch.toml"], "nosuch.toml"),
        (["--tool-latency", "sometimes"], "--tool-latency is 'sometimes'"),
        (["--steps", "two\nlines"], "whole number"),
        (["--run-dir", "/dev/null/run"], "not a directory"),
    ],
)
def test_bad_option(call, arguments, part):
    assert_refused(call(*arguments), part)
    assert list(call.here.iterdir()) == []


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
def test_model_directory_with_a_fault(call, damage, part):
    damage(write_small_model(call.here / "model", shards=2))
    assert_refused(call("--model", "model", "--device", "cpu"), part)
    assert [path.name for path in call.here.iterdir()] == ["model"]


def test_run_directory_that_holds_a_run(call):
    old = call.here / "old"
    old.mkdir()
    (old / "events.jsonl").write_text("{}\n")
    assert_refused(call("--run-dir", "old"), "--run-dir is old", "holds a run already")
    assert [path.name for path in old.iterdir()] == ["events.jsonl"]


def test_audit_of_a_directory_without_a_run(call):
    headway = call.here / "headway.py"
    headway.write_text(
        f"import sys; sys.path.insert(0, {str(RUN.parent)!r})\nfrom pipeline.commands.cli import main; sys.exit(main())"
    )
    assert_refused(call("audit", "nosuch", script=headway), "holds no events.jsonl")
    assert_refused(call("audit", script=headway), "headway audit RUN_DIR")
    assert_refused(call("auditt", script=headway), "Did you mean audit?")
    assert_refused(call("report", "x", script=headway), "isn't built yet")
    assert_refused(call("eval", script=headway), "headway eval DIR|RUN_DIR")
    assert_refused(call("eval", "nosuch", script=headway), "is 'nosuch'")
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
