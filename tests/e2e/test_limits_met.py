"""run.py where the machine allows too little: each time one sentence with what is needed and what there is, no worker
started, nothing left.

Disks and control groups are made for the test, which needs rights that not every machine gives.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from pipeline import audit
from tests.e2e.run_py import RunFiles, when_written

ROOT = Path(__file__).parent.parent.parent
SECONDS = 100.0  # bound on every wait
RUN_PY = f"{sys.executable} {ROOT / 'run.py'}"
SMALL = "--device cpu --groups-per-step 2 --group-size 4"
COMMAND = f"exec {RUN_PY} {SMALL} --steps 1"
CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")


def run(setup, where, tmp_path):
    """run.py, started by a shell that has done `setup` first; its run directory would be `where`."""
    command = f"{setup}\n{COMMAND} --run-dir {where}"
    return subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def sentence(done, status):
    """The only line of its errors, and the only thing that it said of a run that had not begun."""
    assert done.returncode == status, done
    assert done.stderr.startswith("headway: ") and done.stderr.count("\n") == 1, done
    return done.stderr.removeprefix("headway: ").rstrip("\n")


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("-n 60", r"files open in one process \(\d+ are open already\), and that may have 60; raise the limit"),
        ("-f 1000", "of up to 8,388,608 bytes, and a file of this process may have 1,024,000; raise the limit"),
    ],
)
def test_a_limit_of_the_shell(tmp_path, limit, said):
    done = run(f"ulimit {limit}", tmp_path / "run", tmp_path)
    with pytest.raises(ValueError, match=said):
        raise ValueError(sentence(done, 2))
    assert os.listdir(tmp_path) == []


@pytest.fixture
def own_mounts(tmp_path):
    """mounted(script): a shell with a mount namespace of its own, in which `disk` of tmp_path is for mounts."""
    tried = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount anything here")
    (tmp_path / "disk").mkdir()

    def mounted(script):
        command = ["unshare", "-m", "bash", "-ec", script]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)

    return mounted


def test_a_disk_that_can_only_be_read(own_mounts, tmp_path):
    done = own_mounts(f"mount --bind disk disk; mount -o remount,bind,ro disk; {COMMAND} --run-dir disk/run")
    assert sentence(done, 2) == f"--run-dir is disk/run, but {tmp_path}/disk can't be written to; name another one."


def test_a_disk_with_too_little_room_for_a_checkpoint(own_mounts, tmp_path):
    said = sentence(own_mounts(f"mount -t tmpfs -o size=64k tmpfs disk; {COMMAND} --run-dir disk/run"), 2)
    assert said.startswith("The run's last checkpoint will take ") and "has 65,536 free; make room" in said


def test_a_disk_without_room_for_another_file(own_mounts):
    said = sentence(own_mounts(f"mount -t tmpfs -o nr_inodes=1 tmpfs disk; {COMMAND} --run-dir disk/run"), 2)
    assert said.startswith("disk/run can't be made or written: No space left on device (")
    assert said.endswith(" bytes and 0 further files are free); make room, or use another disk.")


@pytest.fixture
def small_disk(own_mounts, tmp_path):
    """A directory with a disk of 16 MiB of its own: that of a process which alone has it mounted."""
    script = "mount -t tmpfs -o size=16m tmpfs disk; echo mounted; exec sleep 1000"
    holder = subprocess.Popen(["unshare", "-m", "bash", "-ec", script], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"mounted\n"
        yield Path(f"/proc/{holder.pid}/root{tmp_path}/disk")
    finally:
        holder.kill()
        holder.communicate()


def fill(disk):
    """Until nothing fits any more."""
    with open(disk / "fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65_536))


def test_a_disk_that_fills_up_ends_the_run_and_costs_nothing_but_the_room(kept, small_disk, tmp_path):
    """What was saved stays good: the run goes on from there when there is room again."""
    run = RunFiles(small_disk / "run")
    options = (*SMALL.split(), "--run-dir", str(run.run_dir))
    with when_written(run.run_dir, "metrics.jsonl", then=lambda: fill(small_disk)):
        code, _, err = kept.command(tmp_path, "run", *options, "--steps", "100000")
    assert code == 1
    said = err.splitlines()[-1]
    assert said.startswith(f"headway: {run.run_dir}/") and "No space left on device" in said and " free" in said, err
    assert list((run.run_dir / "checkpoints").glob("version-*"))
    (small_disk / "fill").unlink()
    steps = len(run.lines("metrics.jsonl"))
    assert kept.command(tmp_path, "run", "--resume", str(run.run_dir), "--steps", str(steps + 1))[::2] == (0, "")
    assert [line["step"] for line in run.lines("metrics.jsonl")] == list(range(1, steps + 2))
    assert audit.main(str(run.run_dir / "events.jsonl")) == 0


def test_no_place_for_sockets(own_mounts, tmp_path):
    """One with too long a name, and others that can only be read."""
    long = tmp_path / ("x" * 80)
    long.mkdir()
    setup = (
        "mount -t tmpfs tmpfs disk; for place in /tmp /var/tmp; do mount --rbind $place $place; "
        f"mount -o remount,bind,ro $place; done; unset TEMP TMP XDG_RUNTIME_DIR; export TMPDIR={long}; cd $PWD/disk"
    )
    said = sentence(own_mounts(f"{setup}; {COMMAND} --run-dir run"), 1)
    assert said.startswith(
        f"There is no place for the run's sockets: {long} has a name of {len(str(long))} bytes, where"
    )
    assert "; /tmp can't be used (Read-only file system); /var/tmp can't be used (Read-only file system); " in said
    assert said.endswith("Set TMPDIR to a directory with a short name that can be written to.")


def test_a_container_with_too_little_memory(tmp_path):
    group = CONTROL_GROUPS / f"headway-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("400M")
    except OSError:
        pytest.skip("this user may not make control groups here")
    try:
        said = sentence(run(f"echo $$ > {group}/cgroup.procs", "run", tmp_path), 2)
        need, have = said.removeprefix("This run needs ").partition(" of this machine's memory, where ")[::2]
        assert float(need.removesuffix(" GiB")) > 0.5 > 0.4 > float(have.partition(" GiB are free: ")[0])
        assert os.listdir(tmp_path) == []
    finally:
        group.rmdir()
