"""A run that nobody disturbs: what its processes hold must not grow with the number of its updates."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from bench.soak.memory import MemoryLog
from bench.soak.processes import MARK
from bench.soak.struck_run import ROOT

OPTIONS = ("--task", "guess", "--mode", "async", "--groups-per-step", "2", "--group-size", "4", "--device", "cpu")
GROWTH_BYTES = 8 << 20  # per 1,000 updates: what the files of a week's run, 1,000,000 updates, may not be kept in
GROWTH_COUNT = 1.0  # descriptors or threads per 1,000 updates
LEAST_PUBLISHES = 500  # for a growth to be more than noise
SECONDS_PER_UPDATE = 3.0  # bound on the wait


def calm_run(directory: Path, temporary: Path, publishes: int) -> dict[str, Any]:
    """Train `publishes` steps of `guess` in `directory`, and tell how the processes grew."""
    mark, memory = uuid.uuid4().hex, MemoryLog()
    command = [sys.executable, str(ROOT / "run.py"), *OPTIONS, "--steps", str(publishes), "--run-dir", str(directory)]
    environment = os.environ | {MARK: mark, "TMPDIR": str(temporary)}
    began = time.monotonic()
    violations = []
    with open(directory.with_name(directory.name + ".output"), "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        while process.poll() is None and time.monotonic() - began < 60.0 + SECONDS_PER_UPDATE * publishes:
            memory.look(mark, time.monotonic())
            time.sleep(0.2)
        if process.poll() is None:
            process.kill()
    if process.wait() != 0:
        violations.append(f"the undisturbed run ended with exit code {process.returncode}")
    growth = memory.growth(publishes)
    for name, grown in growth.items() if publishes >= LEAST_PUBLISHES else ():
        if grown["rss_bytes"] > GROWTH_BYTES or max(grown["descriptors"], grown["threads"]) > GROWTH_COUNT:
            violations.append(f"in 1,000 updates the {name} grew by {grown}")
    return {
        "publishes": publishes,
        "seconds": round(time.monotonic() - began, 1),
        "most": memory.most(),
        "growth_per_1000": growth,
        "violations": violations,
    }
