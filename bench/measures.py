"""What one run's files say about it: speeds, waits and ages, each only from a log that passes the audit.

Interval: from the end of the first step to the end of the last one. Everything that is not named otherwise is of the
interval, that is of batches 2 to N: starting processes, the first rollouts and the evaluation are outside of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import BenchError
from bench.ideal import TRAINING, Work, ideal, ideal_speed, read_work, steady_speed
from pipeline.audit import Audit

LAST_STEPS = 20  # the reward is averaged over

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One arm of one seed."""

    steps: int
    interval_seconds: float
    steps_per_second: float
    whole_steps_per_second: float  # of all steps, from the first admission: with the first rollouts
    generated_tokens_per_second: float
    learner_busy_frac: float  # share of the interval in forward, backward, optimizer and publishing
    wait_seconds: float  # the trainer had nothing to train
    bound_wait_seconds: float  # the part in which a full batch was ready but the age bound held it back
    age_p50: float  # versions; of the segments in the batches, each counted once
    age_p99: float
    age_max: int
    reward_last: float  # mean of the last LAST_STEPS batches
    ideal_steps_per_second: float
    ideal_busy_frac: float  # of the whole replay
    trajectory_work_frac: float  # of a trajectory's time from its first request to its end: segments and tools
    update_work_frac: float  # of the time from the choice of a batch to its publication: the learner's work

    @property
    def achieved_of_ideal(self) -> float:
        return self.steps_per_second / self.ideal_steps_per_second


def read_lines(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check_audit(run_dir: Path, steps: int) -> None:
    """Raise BenchError, with the first findings, unless the run's log proves `steps` batches and every promise."""
    path = run_dir / "events.jsonl"
    with open(path, encoding="utf-8") as lines:
        audit = Audit(lines)
    if audit.findings:
        found = "; ".join(audit.findings[:3])
        raise BenchError(f"The audit of {path} has {len(audit.findings)} findings, so nothing is reported: {found}.")
    if audit.batches != steps:
        raise BenchError(f"{path} holds {audit.batches} batches instead of {steps}; arms need equal steps.")


def read_run(run_dir: Path) -> tuple[Measures, Work]:
    """Measures of a completed run's directory, and the work in it."""
    events, metrics = read_lines(run_dir / "events.jsonl"), read_lines(run_dir / "metrics.jsonl")
    work = read_work(events, metrics)
    return measure(events, metrics, work), work


def measure(events: Lines, metrics: Lines, work: Work) -> Measures:
    """See `Measures`. events, metrics: the lines of the run's two logs, all batches."""
    ends = [line["time"] for line in metrics]
    speed = steady_speed(ends)
    interval = ends[-1] - ends[0]
    later = metrics[1:]
    admitted_at = next(event["t"] for event in events if event["event"] == "admitted")
    ages = segment_ages(events)
    replayed = ideal(work)
    return Measures(
        steps=len(metrics),
        interval_seconds=interval,
        steps_per_second=speed,
        whole_steps_per_second=len(metrics) / (ends[-1] - admitted_at),
        generated_tokens_per_second=_sum(later, "sampling/generated_tokens") / interval,
        learner_busy_frac=sum(work.train_seconds[1:]) / interval,
        wait_seconds=sum(
            event["seconds"]
            for event in events
            if event["event"] == "wait" and event["step"] > 1 and event["why"] != "evaluation"
        ),
        bound_wait_seconds=_sum(later, "staleness/wait_seconds"),
        age_p50=float(np.percentile(ages, 50)),
        age_p99=float(np.percentile(ages, 99)),
        age_max=max(ages),
        reward_last=float(np.mean([line["reward/mean"] for line in metrics[-LAST_STEPS:]])),
        ideal_steps_per_second=ideal_speed(replayed),
        ideal_busy_frac=replayed.busy_frac,
        trajectory_work_frac=sum(map(sum, work.durations)) / _trajectory_seconds(events),
        update_work_frac=sum(_sum(metrics, key) for key in TRAINING) / _sum(metrics, "train/seconds"),
    )


def segment_ages(events: Lines) -> list[int]:
    """Age at training of every segment in batches 2 to N, in versions."""
    versions: dict[int, list[int]] = {}
    for event in events:
        if event["event"] == "segment":
            versions.setdefault(event["group"], []).append(event["version"])
    return [
        batch["version"] - version
        for batch in events
        if batch["event"] == "batch" and batch["step"] > 1
        for group in batch["groups"]
        for version in versions[group]
    ]


def _trajectory_seconds(events: Lines) -> float:
    """From `started` to `trajectory`, summed over all trajectories."""
    started = {event["trajectory"]: event["t"] for event in events if event["event"] == "started"}
    return sum(event["t"] - started[event["trajectory"]] for event in events if event["event"] == "trajectory")


def _sum(lines: Lines, key: str) -> float:
    return sum(line[key] for line in lines)
