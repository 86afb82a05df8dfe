"""The ideal of a run: its own work, as its logs tell it, replayed by the pure schedule with no overhead.

Work is what a run cannot do without: for a trajectory the seconds of its segments (each from its first forward pass
to its last token) and of its tool calls; for a batch the learner's seconds in forward, backward, optimizer and
publishing. `bench/replay.py` plays them on a virtual clock under the same schedule and concurrency. All else takes
no time there: requests waiting for the sampler, messages, rendering, the environment's reset and reward, making a
batch, the trainer's own work.

The ideal leaves out overhead, not contention: where sampler and learner compete for the same cores, each makes the
other's work take longer, and the longer times are what is replayed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.errors import BenchError
from bench.replay import Replay, replay
from pipeline.schedule import ScheduleRules

TRAINING = ("train/forward_seconds", "train/backward_seconds", "train/optimizer_seconds", "train/publish_seconds")


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one completed run's work, and the schedule that it ran under."""

    rules: ScheduleRules
    concurrency: int
    durations: list[list[float]]  # of each trajectory, one list per group in admission order
    train_seconds: list[float]  # of each batch


def read_work(events: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> Work:
    """The work in a run's events.jsonl and metrics.jsonl. Raises BenchError when the run is not whole.

    Whole: every group that was admitted has all its trajectories, and every batch was an update.
    """
    run = next(event for event in events if event["event"] == "run")
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["event"] in ("segment", "tool"):
            seconds[event["trajectory"]] += event["seconds"]
    num_groups = sum(event["event"] == "admitted" for event in events)
    ended = {event["trajectory"] for event in events if event["event"] == "trajectory"}
    names = [[f"{group}.{member}" for member in range(run["group_size"])] for group in range(num_groups)]
    missing = [name for group in names for name in group if name not in ended]
    if missing:
        raise BenchError(
            f"Trajectory {missing[0]} was admitted but never ended; the ideal needs a run that completed all groups."
        )
    for line in metrics:
        if not line["train/updated"]:
            raise BenchError(f"Batch {line['step']} held no gradient, so it was no update; the ideal counts updates.")
    rules = ScheduleRules(
        groups_per_step=run["groups_per_step"],
        group_size=run["group_size"],
        max_staleness=run["max_staleness"],
        steps=run["steps"],
        num_rows=run["steps"] * run["groups_per_step"],  # which row a group has takes no time
        stale_policy=run["stale_policy"],
        admit_ahead=run["admit_ahead"],
        oversample_factor=run["oversample_factor"],
    )
    return Work(
        rules=rules,
        concurrency=run["concurrency"],
        durations=[[seconds[name] for name in group] for group in names],
        train_seconds=[sum(line[key] for key in TRAINING) for line in metrics],
    )


def ideal(schedule: Work, times: Work | None = None) -> Replay:
    """`schedule`'s run without overhead; with `times`, as long as another run's work took."""
    times = times or schedule
    return replay(schedule.rules, times.durations, schedule.concurrency, times.train_seconds)


def steady_speed(ends: Sequence[float]) -> float:
    """Steps per second from the end of the first step to the end of the last; `ends`: seconds, one per step."""
    if len(ends) < 2:
        raise BenchError(f"The run has {len(ends)} steps; a speed between the ends of steps needs at least 2.")
    return (len(ends) - 1) / (ends[-1] - ends[0])


def ideal_speed(replayed: Replay) -> float:
    """`steady_speed` of a replay."""
    return steady_speed([step.end_at for step in replayed.steps])
