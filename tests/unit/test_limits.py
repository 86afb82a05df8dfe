"""Limits of the system: met on purpose where that is possible, and told in one sentence with need and have."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pipeline as rl
from pipeline.commands import cli
from pipeline.errors import ConfigError, RunError
from pipeline.processes import system_limits
from pipeline.processes.system_limits import largest_bytes, needed_descriptors, refuse_small_limits
from pipeline.processes.worker import worker_pool
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.processes.worker.worker_pool import WorkerPool
from pipeline.run_dir import run_directory
from pipeline.run_dir.run_directory import make_run_dir
from pipeline.tasks import guess
from workers.machine import limits
from workers.machine.limits import free_names, memory_kills, refusal_in_words, require_threads

ROOT = Path(__file__).parent.parent.parent


def trainer(**supervisor):
    model = rl.Supervisor(device="cpu", **supervisor)
    return rl.AsyncTrainer(
        engine=rl.RolloutEngine(model, env=guess.Guess, environment_processes=2),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        optimizer=rl.Adam(lr=1e-3),
        groups_per_step=2,
        group_size=2,
        max_staleness=2,
    )


@pytest.fixture(scope="module")
def spec():
    """Of a small run: one sampler, four slots, 256 trajectories at once."""
    made, _ = trainer()._check(guess.train_rows(0)[:8], 1)
    return made


def in_child(code):
    """What Python code prints that runs in a process of its own, where limits may be lowered."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_descriptors_are_had_up_to_the_hard_limit():
    told = in_child(
        "import resource; from workers.machine.limits import raise_descriptor_limit as ask\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (30, 50))\n"
        "for need in (20, 40, 35, 60): print(ask(need), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert told.splitlines() == ["30 (30, 50)", "40 (40, 50)", "40 (40, 50)", "50 (50, 50)"]


def test_a_run_that_needs_more_files_than_it_may_have_is_refused(spec, monkeypatch):
    need = 7 + needed_descriptors(spec, 2, has_endpoint=False)
    monkeypatch.setattr(system_limits, "open_descriptors", lambda: 7)
    monkeypatch.setattr(system_limits, "raise_descriptor_limit", lambda asked: min(asked, need))
    refuse_small_limits(spec, 2, has_endpoint=False)
    with pytest.raises(ConfigError) as caught:
        refuse_small_limits(spec, 3, has_endpoint=False)
    assert str(caught.value) == (
        f"This run needs up to {need + 7} files open in one process (7 are open already), and that may have {need}; "
        "raise the limit (ulimit -Hn), or lower samplers or environment_processes."
    )
    with pytest.raises(ConfigError, match=rf"up to {need + 512} files .* or lower concurrency\.$"):
        refuse_small_limits(spec, 2, has_endpoint=True)


def test_a_run_whose_files_would_be_larger_than_they_may_be_is_refused(spec, monkeypatch):
    monkeypatch.setattr(system_limits, "largest_file", lambda: largest_bytes(spec))
    refuse_small_limits(spec, 2, has_endpoint=False)
    monkeypatch.setattr(system_limits, "largest_file", lambda: 1_000_000)
    with pytest.raises(ConfigError, match=r"of up to 8,388,608 bytes, and a file of this process may have 1,000,000; "):
        refuse_small_limits(spec, 2, has_endpoint=False)


def test_small_limits_are_told_before_a_run_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(system_limits, "largest_file", lambda: 1_000_000)
    with pytest.raises(ConfigError, match="1,000,000"):
        rl.run(trainer(), guess.train_rows(0)[:8], 1)
    assert os.listdir(tmp_path) == []


def test_a_process_that_can_not_be_started_is_told_in_a_sentence(tmp_path, monkeypatch):
    """As late as a restart: users' limits hold for all their processes together."""

    def refuse(self, *_):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(WorkerHandle, "spawn", refuse)
    pool = WorkerPool()
    with pytest.raises(RunError) as caught:
        pool.spawn(WorkerHandle("sampler", 1, "workers.sampler", 1), str(tmp_path))
    pool.close()
    assert str(caught.value).startswith(
        "The sampler 1 can't be started. Another process or thread was needed, and no more may be started: "
    )


def test_a_process_is_not_started_without_the_files_that_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "open_descriptors", lambda: 90)
    monkeypatch.setattr(worker_pool, "raise_descriptor_limit", lambda asked: 100)
    pool = WorkerPool()
    with pytest.raises(RunError, match=r"environment 0 can't be started: that takes 24 files, .* 90 open of the 100 "):
        pool.spawn(WorkerHandle("environment", 0, "pipeline.environments.process", 1), str(tmp_path))
    pool.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), r"has the \d+ open that it may have; raise ulimit -n\.$"),
        (OSError(errno.ENFILE, ""), r"this machine has all open that it may have; see fs\.file-max\.$"),
        (OSError(errno.ENOMEM, ""), r"^More memory was needed, and [\d,]+ bytes are free for this process; "),
        (MemoryError(), r"^More memory was needed, and [\d,]+ bytes are free for this process; "),
        (
            OSError(errno.ENOSPC, "No space left on device", "/tmp/none/such/file"),
            r"^/tmp/none/such/file can't be made or written: No space left on device \([\d,]+ bytes.* are free\); ",
        ),
        (OSError(errno.ENOSPC, ""), r"^A file can't be written: No space left on device; make room"),
        (OSError(errno.EDQUOT, "", "/tmp"), r"^/tmp can't .*: Disk quota exceeded \("),
        (OSError(errno.EROFS, "", "/tmp/file"), r"^/tmp/file can't .*: its file system can only be read; name "),
        (OSError(errno.EFBIG, "", "/tmp/file"), r"^/tmp/file can't be made or written: "),
    ],
    ids=lambda value: errno.errorcode.get(getattr(value, "errno", None), "") if isinstance(value, Exception) else "",
)
def test_what_the_system_refused_is_one_sentence_with_what_there_is(error, said):
    words = refusal_in_words(error)
    assert words is not None and words.endswith(".") and words.count(". ") == 0
    with pytest.raises(OSError, match=said):
        raise OSError(words)


def test_other_refusals_are_not_taken_for_limits():
    assert refusal_in_words(FileNotFoundError(errno.ENOENT, "No such file")) is None
    assert refusal_in_words(OSError("without a number")) is None


def test_who_allows_no_more_processes_is_named(tmp_path, monkeypatch):
    """ulimit -u, and every control group above this process."""
    (tmp_path / "pids" / "docker" / "one").mkdir(parents=True)
    for folder, limit in (("docker/one", "max"), ("docker", "100")):
        (tmp_path / "pids" / folder / "pids.max").write_text(limit + "\n")
        (tmp_path / "pids" / folder / "pids.current").write_text("99\n")
    monkeypatch.setattr(limits, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(limits, "_text", with_groups(limits._text, "12:cpu:/\n8:pids:/docker/one\n0::/\n"))
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (4096, 4096))
    words = refusal_in_words(BlockingIOError(errno.EAGAIN, ""))
    assert f"started: ulimit -u is 4096, {tmp_path}/pids/docker/pids.max is 100, of which 99 are there; end" in words


def with_groups(text, groups):
    return lambda path: groups if str(path) == "/proc/self/cgroup" else text(path)


def test_the_command_line_tells_a_limit_in_a_sentence(monkeypatch, capsys):
    def refuse(arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(cli, "_command", refuse)
    assert cli.main(["run"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("headway: Another file was needed, and this process has the ") and said.count("\n") == 1


def test_files_that_a_disk_may_still_have_are_told(tmp_path):
    names = free_names(tmp_path)
    assert names is None or names > 0


def test_threads_that_a_library_would_start_are_tried_first(monkeypatch):
    before = threading.active_count()
    require_threads(3)
    assert threading.active_count() == before
    start, left = threading.Thread.start, [True]

    def refuse_the_second(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    with pytest.raises(BlockingIOError):
        require_threads(2)
    assert threading.active_count() == before


def test_a_run_directory_on_a_full_disk_holds_no_half_of_a_run(tmp_path, monkeypatch):
    """config.json alone would say that a run is there."""

    def open_full(*arguments, **options):
        file = open(*arguments, **options)

        def fill(text, write=file.write):
            write(text[:1])
            file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

        file.write = fill
        return file

    monkeypatch.setattr(run_directory, "open", open_full, raising=False)
    with pytest.raises(ConfigError) as caught:
        make_run_dir(str(tmp_path / "run"), {})
    assert not (tmp_path / "run" / "config.json").exists()
    assert "config.json can't be made or written: No space left on device (" in str(caught.value)
    monkeypatch.undo()
    assert make_run_dir(str(tmp_path / "run"), {}).is_dir()


@pytest.mark.parametrize(
    ("told", "kills"), [("nr_free_pages 7\noom_kill 3\noom_kill_x 9\n", 3), ("nr_free_pages 7\n", None), (None, None)]
)
def test_processes_that_the_kernel_killed_for_want_of_memory_are_counted_where_it_tells(
    told, kills, tmp_path, monkeypatch
):
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(limits, "KERNEL_COUNTS", counts)
    if told is not None:
        counts.write_text(told)
    assert memory_kills() == kills
