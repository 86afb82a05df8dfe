"""Runs under fire: processes are killed, stopped and frozen at random, and nothing may be lost, doubled or left behind.

    make soak MINUTES=30
    python -m bench.soak --minutes 5 --out /tmp/soak

A finite data set is trained with run.py, again and again until the time is over, each time in another way
(asynchronous, synchronous with overlap, one policy per segment, held-out evaluations), with tools that are slow, raise
or hang. Every few seconds something is done to a random process: SIGKILL, SIGSEGV, SIGSTOP for a while or for good.
Every tenth kill is the supervisor's; the run is then resumed. Every run has to complete, and its files are replayed
from outside: each row trained exactly once, every token accounted for, the metrics and the environment's own ledger of
rewards in agreement. Then a run goes on undisturbed for --publishes updates: its processes' memory must not grow.

Exit codes: 0 nothing was found, 1 something was, 2 bad options, 130 Ctrl-C. The last line on stdout is JSON with every
number; progress goes to stderr. With --out the run directories stay there, in a folder named by the time.
"""

import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import BenchCommand, result_head, run_root
from bench.errors import BenchError
from bench.small_models import write_small_model
from bench.soak.calm_run import calm_run
from bench.soak.errands import write_rows
from bench.soak.replay import Replay
from bench.soak.run_options import HELD_OUT, RECOVERIES, WAYS, run_options
from bench.soak.strikes import Strike, strikes
from bench.soak.struck_run import ROOT, StruckRun

SHARED_PREFIXES = ("psm_", "sem.", "torch_", "headway")
PATIENCE_SECONDS = 300.0  # from the last strike to the end of the run


@dataclass(frozen=True, slots=True)
class Plan:
    """What the soak is told."""

    minutes: float = 30.0
    every: float = 5.0
    rows: int = 160
    hang: float = 0.001
    publishes: int = 1000
    seed: int = 0
    out: str | None = None


def soak(plan: Plan) -> None:
    """Print the summary. Raises BenchError if anything was found."""
    with run_root(plan.out) as place, tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as temporary:
        root = place.resolve() / time.strftime("%Y%m%d-%H%M%S")
        root.mkdir(parents=True)
        shared = shared_names()
        model = write_small_model(root / "model")
        runs = list(struck_runs(plan, root, model, Path(temporary)))
        calm = calm_run(root / "calm", Path(temporary), plan.publishes) if plan.publishes else None
        report = summary(plan, runs, calm)
        left = [*Path(temporary).iterdir(), *(shared_names() - shared)]
        report["left_behind"] = [str(path) for path in left]
        report["violations"] += [f"left behind: {path}" for path in left]
    print(json.dumps(report, allow_nan=False), flush=True)
    if report["violations"]:
        raise BenchError(f"The soak found {len(report['violations'])} violations; the first: {report['violations'][0]}")


def shared_names() -> set[Path]:
    """Named shared memory: what Python, torch or we may have made. Other programs of the machine make names, too."""
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(SHARED_PREFIXES)}


def struck_runs(plan: Plan, root: Path, model: Path, temporary: Path) -> Iterator[dict[str, Any]]:
    """Run after run, until the time is over; what is to be told of each."""
    until = time.monotonic() + 60.0 * plan.minutes
    drawn = strikes(plan.seed, plan.every)
    number = 0
    while number == 0 or time.monotonic() < until:
        way = list(WAYS)[(number + plan.seed) % len(WAYS)]
        recovery = RECOVERIES[(number + plan.seed) % len(RECOVERIES)]
        yield struck_run(plan, root / f"{number}-{way}", model, temporary, way, recovery, drawn, until)
        number += 1


def struck_run(
    plan: Plan,
    directory: Path,
    model: Path,
    temporary: Path,
    way: str,
    recovery: str,
    drawn: Iterator[Strike],
    until: float,
) -> dict[str, Any]:
    """One run, struck until `until` at most, then left alone until it completes; audited, and told of."""
    rows, ledger = directory.with_suffix(".rows.jsonl"), directory.with_suffix(".ledger.jsonl")
    write_rows(str(rows), plan.rows + HELD_OUT.get(way, 0))
    arguments = {"ledger": str(ledger), "hang": plan.hang, "recovery": recovery}
    options = run_options(way, model, rows, plan.rows, arguments)
    run = StruckRun(directory, uuid.uuid4().hex, temporary, [*options, "--seed", str(plan.seed)])
    began = time.monotonic()
    try:
        completed = run.run(drawn, until, PATIENCE_SECONDS)
    finally:
        run.end()
    told: dict[str, Any] = {
        "way": way,
        "recovery": recovery,
        "seconds": round(time.monotonic() - began, 1),
        "kills": run.kills,
        "struck": dict(sorted(run.struck.items())),
        "exits": dict(run.exits),
        "longest_end_seconds": max(run.gone_seconds, default=0.0),
        "stop_seconds": run.stop_seconds,
        "most": run.memory.most(),
    }
    violations = list(run.violations)
    if completed:
        replay = Replay(run.directory, ledger, plan.rows)
        told["counts"] = dict(sorted(replay.counts.items()))
        violations += replay.violations + audit_findings(run.directory)
    told["violations"] = [f"{directory.name}: {sentence}" for sentence in violations]
    print(json.dumps(told), file=sys.stderr, flush=True)
    return told


def audit_findings(run_dir: Path) -> list[str]:
    """What `headway audit` says against the run, by the audit's file alone."""
    command = [sys.executable, "-P", str(ROOT / "pipeline" / "audit.py"), "events.jsonl"]
    done = subprocess.run(command, cwd=run_dir, capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        return []
    # Of an audit that broke down there is nothing but a trace.
    lines = done.stdout.splitlines()[2:] or [f"it ended with {done.returncode}: {done.stderr[-500:]}"]
    return [f"headway audit: {line}" for line in lines]


def summary(plan: Plan, runs: list[dict[str, Any]], calm: dict[str, Any] | None) -> dict[str, Any]:
    """The result."""
    struck, exits = Counter(), Counter()
    for run in runs:
        struck.update(run["struck"])
        exits.update(run["exits"])
    violations = [sentence for run in runs for sentence in run["violations"]]
    violations += calm["violations"] if calm is not None else []
    return result_head("soak", plan) | {
        "runs_completed": exits["completed"],
        "kills": sum(run["kills"] for run in runs),
        "struck": dict(sorted(struck.items())),
        "exits": dict(sorted(exits.items())),
        "longest_end_seconds": max(run["longest_end_seconds"] for run in runs),
        "longest_stop_seconds": max((seconds for run in runs for seconds in run["stop_seconds"]), default=0.0),
        "runs": runs,
        "calm": calm,
        "violations": violations,
    }


COMMAND = BenchCommand(
    doc=__doc__,
    plan=Plan,
    own={
        "minutes": (float, "for how long runs are struck"),
        "every": (float, "mean seconds between two strikes"),
        "rows": (int, "of the data set"),
        "hang": (float, "probability that a tool call never ends"),
        "publishes": (int, "updates of the undisturbed run at the end, whose growth is judged from 500 on; 0: none"),
        "out": (str, "where the run directories go and stay"),
    },
    minima={"minutes": 0.0, "every": 0.1, "rows": 1, "hang": 0.0, "publishes": 0},
    configs=lambda plan: [],
    bench=soak,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
