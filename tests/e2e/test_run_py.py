"""`python run.py` from its start to its exit code, each time looked at from outside."""

import contextlib
import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from promised_metrics import KEYS, KEYS_OF_AN_UPDATE
from run_py import (
    ROOT,
    SMALL,
    RunFiles,
    RunPy,
    assert_ended,
    audit,
    check_whole,
    socket_directories,
    wait_until_gone,
    when_written,
)

from pipeline.commands import cli
from tests.shared_files import shared_memory_files

LONG = ("--steps", "100000")  # longer than any test: something else ends it
GONE_SECONDS = 5.0  # within which all workers of a killed supervisor must be gone


@pytest.fixture
def temporary():
    """A directory for temporary files whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as path:
        yield path


@pytest.fixture
def start(tmp_path, temporary):
    """start(name, *arguments) starts run.py with the run directory tmp_path/name."""
    runs = []

    def begin(name, *arguments, **options):
        runs.append(RunPy(tmp_path / name, temporary, *arguments, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def test_two_runs_at_once_each_leave_a_whole_run_and_nothing_else(start, temporary):
    """Both modes side by side; each would take the other's sockets, memory or files if they shared any."""
    runs = {mode: start(mode, "--mode", mode, "--steps", "4") for mode in ("async", "sync")}
    for mode, run in runs.items():
        assert (run.wait(), run.stderr) == (0, ""), mode
    assert socket_directories(temporary) == []
    for mode, run in runs.items():
        (end,) = run.events("end")
        assert (end["status"], end["steps"], end["consumed"], end["outstanding"]) == ("completed", 4, 8, 0)
        assert run.events("run")[0]["max_staleness"] == {"async": 2, "sync": 0}[mode]
        done = audit(run.run_dir)
        assert done.returncode == 0, done.stdout + done.stderr

        names = {path.name for path in run.run_dir.iterdir()}
        assert names == {
            "config.json",
            "events.jsonl",
            "metrics.jsonl",
            "trajectories.jsonl",
            "checkpoints",
            "journal",
            "logs",
        }
        logs = {path.name for path in (run.run_dir / "logs").iterdir()}
        assert logs == {"learner-0.log", "sampler-0.log", "environment-0.log"}

        metrics = run.lines("metrics.jsonl")
        assert [line["step"] for line in metrics] == [1, 2, 3, 4]
        updates = [line for line in metrics if line["train/updated"]]
        assert metrics[-1]["model_step"] == len(updates) > 0
        saved = {path.name for path in (run.run_dir / "checkpoints").iterdir()}
        assert saved == {"version-0", f"version-{len(updates)}"}
        for line in metrics:
            assert line.keys() >= KEYS, KEYS - line.keys()
        for line in updates:
            assert line.keys() >= KEYS_OF_AN_UPDATE, KEYS_OF_AN_UPDATE - line.keys()
        generated = sum(event["tokens"] for event in run.events("segment"))
        assert generated == sum(line["train/generated_tokens"] for line in metrics)

        # One trajectory of each batch with its conversation: all turns of the model but the last have an answer.
        ended_by_name = {event["trajectory"]: event for event in run.events("trajectory")}
        for line, batch in zip(run.lines("trajectories.jsonl"), run.events("batch"), strict=True):
            assert (line["step"], line["group"] in batch["groups"]) == (batch["step"], True)
            ended = ended_by_name[f"{line['group']}.{line['member']}"]
            assert (line["reward"], line["tokens"]) == (ended["reward"], ended["tokens"])
            assert batch["age_min"] <= max(segment["age"] for segment in line["segments"]) <= batch["age_max"]
            roles = [message["role"] for message in line["messages"]]
            assert roles == ["user", *["assistant", "tool"] * (line["turns"] - 1), "assistant"]

        # Not a terminal: plain lines, the first and the last step among them, no control codes.
        lines = run.stdout.splitlines()
        assert "\x1b" not in run.stdout and "\r" not in run.stdout
        # On a busy machine, lines that tell of a long wait come before it.
        told = [line for line in lines if not line.startswith(f"{mode}: starting | waits: ")]
        assert told[0].startswith(f"{mode} 1/4 | reward ")
        assert any(line.startswith(f"{mode} 4/4 | reward ") for line in lines)
        assert any(line.startswith("completed after 4 of 4 steps") for line in lines)
        assert f"files: {run.run_dir}" in lines


def run_here(kept, run_dir, *arguments):
    """run.py's options, in this process: (exit code, stdout, stderr) and what the run wrote."""
    options = ("run", *arguments, *SMALL, "--device", "cpu", "--run-dir", str(run_dir))
    return kept.command(run_dir.parent, *options), RunFiles(run_dir)


def test_loss_of_the_users_own_lies_in_the_current_directory(kept, tmp_path):
    """With every term of the loss, in bfloat16; and its name is checked before any process starts."""
    (tmp_path / "my_losses.py").write_text("def simple(p, q, a, mask, ages):\n    return -a * p\n")
    options = ["--loss", "custom", "--loss-function", "my_losses:simple", "--normalize", "sequence"]
    options += ["--kl-coefficient", "0.1", "--entropy-coefficient", "0.01", "--advantage", "batch_std"]
    (code, _, err), run = run_here(kept, tmp_path / "run", "--steps", "2", "--dtype", "bfloat16", *options)
    assert (code, err) == (0, "") and audit(run.run_dir).returncode == 0
    for line in run.lines("metrics.jsonl"):
        assert {"train/kl", "train/entropy", "importance/ratio_mean"} <= line.keys() and line["train/updated"] == 1
    wrong = ("--loss", "custom", "--loss-function", "my_losses:simpler")
    (code, _, err), refused = run_here(kept, tmp_path / "refused", *wrong)
    assert code == 2 and "my_losses.py defines no simpler" in err
    assert err.startswith("headway: --loss-function is 'my_losses:simpler'")
    assert not refused.run_dir.exists()


def test_run_that_can_not_save_its_weights_has_failed(kept, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("in the way")
    (code, out, err), run = run_here(kept, run_dir, "--steps", "1")
    checkpoint = f"{run_dir}/checkpoints/version-{len(run.events('published'))}"
    warned, error = err.splitlines()  # of the first one, without which it goes on; then of the last one
    assert warned.startswith(
        f"headway: warning: No checkpoint of version 0: {run_dir}/checkpoints/version-0 can't be made"
    )
    assert (code, error) == (1, f"headway: {checkpoint} can't be made: File exists; see to that place.")
    assert [event["status"] for event in run.events("end")] == ["failed"]
    assert "failed after 1 of 1 steps" in out and "checkpoint:" not in out
    assert audit(run_dir).returncode == 0


def test_ctrl_c_ends_a_long_evaluation_at_once_and_the_summary_tells_the_one_before(kept, tmp_path):
    """Ctrl-C comes as a signal to this process, when the run has its handler."""
    run_dir = tmp_path / "run"
    small, endless = ("--eval-rows", "16", "--eval-group-size", "1"), ("--eval-final-group-size", "4096")
    options = ("--steps", "1", "--eval-every", "1", *small, *endless, "--tool-latency", "fixed:100")
    with when_written(run_dir, "eval.jsonl", "metrics.jsonl", then=lambda: os.kill(os.getpid(), signal.SIGINT)):
        (code, out, err), run = run_here(kept, run_dir, *options)
    assert (code, err) == (130, "") and audit(run_dir).returncode == 0
    (result,) = run.lines("eval.jsonl")
    assert (result["version"], result["batch"], result["trajectories"]) == (0, 0, 16)
    assert f"evaluation: reward {result['reward_mean']:.3f} of 16 trajectories on 16 held-out rows, at" in out
    assert [event["status"] for event in run.events("evaluation")] == ["completed", "stopped"]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_modules_load_end_the_run_in_silence(start, temporary, number, code, times):
    run = start("run", *LONG)
    # From its own first module on; before that, Python itself would answer.
    run.wait_until(lambda: maps_any(run.process.pid, ("msgpack", "numpy", "zmq")), "first module")
    for _ in range(times):
        run.process.send_signal(number)
        time.sleep(0.01)
    assert (run.wait(), run.stderr) == (code, "")
    assert socket_directories(temporary) == []


def start_and_send_while_loading(directory, number):
    """run.py. A module of this name comes before the installed one, and sends it the signal where what that raises
    would be lost.
    """
    (directory / "msgpack.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    pass\n"
        "raise ModuleNotFoundError(name='msgpack')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(directory)}
    return subprocess.run(
        [sys.executable, ROOT / "run.py"], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_is_obeyed_where_a_module_swallows_all_exceptions_as_it_loads(tmp_path, number, code):
    done = start_and_send_while_loading(tmp_path, number)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signal_that_run_py_was_started_deaf_to_is_ignored_while_modules_load(tmp_path, number):
    before = signal.signal(number, signal.SIG_IGN)  # the child inherits it
    try:
        done = start_and_send_while_loading(tmp_path, number)
    finally:
        signal.signal(number, before)
    assert done.returncode == 2 and done.stderr.startswith("headway: msgpack is not installed")


def maps_any(pid, words):
    """Has the process mapped a file with one of these words in its path?"""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(word in maps for word in words)


def test_ctrl_c_while_workers_start_ends_the_run_at_once(start, temporary):
    """The learner is halted as soon as it exists, so the run can't get beyond its start."""
    run = start("run", *LONG)
    run.wait_until(lambda: "workers.learner" in run.workers(), "learner")
    learner = run.workers()["workers.learner"]
    learner.suspend()
    try:
        run.press_ctrl_c()
        end = assert_ended(run, 130, "stopped", temporary)
        wait_until_gone([learner], GONE_SECONDS)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            learner.kill()
    assert (end["steps"], end["admitted"]) == (0, 0)


def test_closed_terminal_ends_the_run_in_order_and_a_signal_while_the_processes_end_leaves_nothing(start, temporary):
    """The sampler is halted, so that the supervisor waits for it when everything else is done; what it prints then
    finds no terminal any more. The exit code is that of the first signal, SIGHUP.
    """
    run = start("run", *LONG, on_terminal=True)
    run.wait_for_steps(2)
    workers = run.wait_for_workers()
    workers["workers.sampler"].suspend()
    run.close_terminal()
    run.process.send_signal(signal.SIGHUP)  # a shell's, beside the kernel's
    run.wait_until(lambda: [event for event in run.events("checkpoint") if event["version"] > 0], "checkpoint")
    run.press_ctrl_c()
    assert_ended(run, 129, "stopped", temporary)
    wait_until_gone(workers.values(), GONE_SECONDS)
    assert "async: starting | waits: the processes to start" in run.stdout and "stopped after" not in run.stdout


def test_killed_supervisor_takes_its_workers_along_and_its_run_is_resumed(start, temporary):
    """Beside another run, which all that does not touch; that one is then ended by Ctrl-C, after the update that has
    begun.
    """
    shared_memory = shared_memory_files()
    other = start("other", *LONG, "--tool-latency", "fixed:100")  # so that it leaves the processors to the others
    run = start("killed", *LONG)
    run.wait_for_steps(2)
    other.wait_for_steps(1)
    workers = run.wait_for_workers()
    directories = set(socket_directories(temporary))
    assert len(directories) == 2
    assert {stat.S_IMODE(one.stat().st_mode) for one in directories} == {0o700}
    workers["workers.sampler"].suspend()  # also one that can't act
    run.process.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    wait_until_gone(workers.values(), GONE_SECONDS)
    assert shared_memory_files() <= shared_memory
    assert set(socket_directories(temporary)) == directories
    findings = audit(run.run_dir).stdout.splitlines()  # its log breaks off, but holds nothing untrue
    assert "the last event is not end" in findings[-2] and findings[-1] == "1 findings"

    steps = len(run.lines("metrics.jsonl")) + 3
    following = start("killed", "--resume", "killed", "--steps", str(steps), script=ROOT / "run.py")
    following.wait_until(lambda: "workers.learner" in following.workers(), "learner")
    assert len(directories & set(socket_directories(temporary))) == 1  # it has swept
    assert (following.wait(), following.stderr) == (0, ""), following.stdout
    check_whole(following, steps, resumed=1)

    other.wait_for_steps(len(other.lines("metrics.jsonl")) + 1)
    other.press_ctrl_c()
    end = assert_ended(other, 130, "stopped", temporary)
    assert 2 <= end["steps"] == len(other.lines("metrics.jsonl")) < 100000
    assert len(other.events("optim")) == len(other.events("published"))
    assert f"stopped after {end['steps']} of 100000 steps" in other.stdout
    checkpoint = other.events("checkpoint")[-1]
    assert checkpoint["version"] == len(other.events("published"))
    assert f"checkpoint: {other.run_dir / checkpoint['path']}" in other.stdout.splitlines()


def test_dead_learner_that_may_not_be_replaced_is_one_sentence_and_exit_1(kept, tmp_path):
    killed = []

    def kill():
        killed.extend(handle.pid for handle in kept.handles if handle.role == "learner")
        os.kill(*killed, signal.SIGKILL)

    with when_written(tmp_path / "run", "metrics.jsonl", then=kill):
        (code, out, err), run = run_here(kept, tmp_path / "run", *LONG, "--max-restarts", "0")
    assert code == 1 and err.startswith("headway: ") and err.count("\n") == 1
    assert f"The learner 0 (pid {killed[0]}) was killed by SIGKILL" in err and "max_restarts is 0" in err
    assert [event["status"] for event in run.events("end")] == ["failed"]
    assert audit(run.run_dir).returncode == 0
    assert "failed after" in out


def test_reader_that_goes_away_ends_the_run_in_order_and_in_silence(kept, tmp_path):
    """`headway run … | head -1`, in this process; that nothing is said at a process's exit either is proved by
    test_bad_options.py.
    """
    read, write = os.pipe()

    def read_one_step():
        with open(read) as lines:
            while " | reward " not in (line := lines.readline()):
                assert line.startswith("async: starting | waits: ")

    reading = threading.Thread(target=read_one_step)
    reading.start()
    err = io.StringIO()
    command = ("run", *LONG, *SMALL, "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    with kept.serve(), open(write, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(command)
    reading.join()
    assert (code, err.getvalue()) == (1, "")
    assert RunFiles(tmp_path / "run").events("end")[-1]["status"] == "stopped"
