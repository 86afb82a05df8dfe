"""Draw the pictures of docs/async.md from the events.jsonl of real runs: two timelines, and two sampling policies.

    pip install -e '.[plots]'
    SAME="--tool-latency lognormal:10:1.0 --steps 20"
    python run.py --config recipes/guess-sync.toml $SAME --run-dir runs/sync
    python run.py --config recipes/guess-async.toml $SAME --run-dir runs/async
    python docs/draw_timelines.py timeline runs/sync docs/images/sync.svg
    python docs/draw_timelines.py timeline runs/async docs/images/async.svg
    SEGMENT="--sampling-policy segment --kv-max-staleness 2"
    python run.py --config recipes/guess-async.toml $SAME $SEGMENT --run-dir runs/segment
    python docs/draw_timelines.py pinning runs/async runs/segment docs/images/pinning.svg

Every length is a measured duration, to one scale. Times are seconds since the left edge.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Events = Sequence[Mapping[str, Any]]

FIRST_STEP, NUM_STEPS = 4, 6  # the batches that a timeline shows: those before are filled by the start of the run
NUM_TRAJECTORIES = 6  # that each half of the pinning picture shows
INK = "#6e7781"  # text and lines: legible on white and on black
COLOURS = ("#3b82c4", "#d9822b", "#3a9d6b", "#b0559b", "#8a7a3d", "#5b6ac4", "#c4533b")
BOUND = "#d1242f"  # waits for the age bound


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time, in seconds since the run's start."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class BatchBars:
    """One batch. groups: each from its first trajectory's start to its last one's end; learner: from the choice of the
    batch to its published weights, None when it held no gradient."""

    step: int
    groups: tuple[Bar, ...]
    learner: Bar | None

    @property
    def sampling(self) -> Bar:
        return Bar(min(bar.start for bar in self.groups), max(bar.end for bar in self.groups))


@dataclass(frozen=True, slots=True)
class WaitBar:
    """The trainer waits. for_bound: a full batch was ready, but training it would have made another group too old."""

    bar: Bar
    for_bound: bool


@dataclass(frozen=True, slots=True)
class TurnBar:
    """One sampling request and what follows it up to the next one (its tool call), under one policy version."""

    version: int
    sampling: Bar
    end: float


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    with open(run_dir / "events.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def batch_bars(events: Events) -> list[BatchBars]:
    """The batches of a run, in order."""
    started: dict[int, float] = {}
    ready: dict[int, float] = {}
    learner_end: dict[int, float] = {}
    batches = []
    trained = None
    for event in events:
        match event["event"]:
            case "started":
                started.setdefault(event["group"], event["t"])
            case "ready":
                ready[event["group"]] = event["t"]
            case "batch":
                batches.append(event)
                trained = event["step"]
            case "published":
                learner_end[trained] = event["t"]
    return [
        BatchBars(
            step=batch["step"],
            groups=tuple(Bar(started[group], ready[group]) for group in batch["groups"]),
            learner=Bar(batch["t"], learner_end[batch["step"]]) if batch["step"] in learner_end else None,
        )
        for batch in batches
    ]


def wait_bars(events: Events) -> list[WaitBar]:
    """The trainer's waits, in order. An event is written at the end of its wait."""
    return [
        WaitBar(Bar(event["t"] - event["seconds"], event["t"]), for_bound=event["why"] != "ready")
        for event in events
        if event["event"] == "wait"
    ]


def turn_bars(events: Events) -> dict[str, list[TurnBar]]:
    """Each ended trajectory's turns, in order."""
    segments: dict[str, list[tuple[int, Bar]]] = {}
    ends: dict[str, float] = {}
    for event in events:
        if event["event"] == "segment":
            bar = Bar(event["t"] - event["seconds"], event["t"])
            segments.setdefault(event["trajectory"], []).append((event["version"], bar))
        elif event["event"] == "trajectory":
            ends[event["trajectory"]] = event["t"]
    turns = {}
    for name, end in ends.items():
        bars = segments.get(name, [])
        until = [bar.start for _, bar in bars[1:]] + [end]
        turns[name] = [TurnBar(version, bar, until[index]) for index, (version, bar) in enumerate(bars)]
    return turns


def update_times(events: Events) -> list[tuple[int, float]]:
    """(version, when its weights were published), in order."""
    return [(event["version"], event["t"]) for event in events if event["event"] == "published"]


def lanes(bars: Iterable[Bar]) -> list[int]:
    """A lane for each bar, given by start, so that bars of one lane don't overlap; as few lanes as it takes."""
    free_at: list[float] = []
    chosen = []
    for bar in bars:
        lane = next((lane for lane, free in enumerate(free_at) if free <= bar.start), len(free_at))
        if lane == len(free_at):
            free_at.append(bar.end)
        else:
            free_at[lane] = bar.end
        chosen.append(lane)
    return chosen


def overlaps(bar: Bar, window: Bar) -> bool:
    return bar.start < window.end and bar.end > window.start


def crossing(turns: Mapping[str, Sequence[TurnBar]], updates: Sequence[tuple[int, float]]) -> list[str]:
    """The trajectories that go on over at least two updates, longest first (ties: by name)."""

    def crossed(name: str) -> int:
        first, end = turns[name][0].sampling.start, turns[name][-1].end
        return sum(first < time < end for _, time in updates)

    found = [name for name, bars in turns.items() if len(bars) > 1 and crossed(name) >= 2]
    return sorted(found, key=lambda name: (turns[name][0].sampling.start - turns[name][-1].end, name))


# --- drawing -------------------------------------------------------------------------------------------------------


def colour_of(number: int) -> str:
    """Of a batch, or of a policy version."""
    return COLOURS[number % len(COLOURS)]


def new_figure(height: float, rows: int = 1):
    # Here and not at the top: an extra that nothing else needs, and the functions above are tested without it.
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, ids stay the same from one drawing to the next.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "headway", "font.size": 10}
    matplotlib.rcParams |= {"font.family": "sans-serif", "text.color": INK, "axes.labelcolor": INK}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, 1, figsize=(9, height), squeeze=False, layout="constrained")
    for axis in axes[:, 0]:
        axis.tick_params(colors=INK, length=3)
        for side, spine in axis.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(INK)
    return figure, list(axes[:, 0])


def save(figure, path: Path, title: str, description: str) -> None:
    """Write the picture; a file of the same run is the same, byte for byte."""
    figure.savefig(
        path, transparent=True, metadata={"Title": title, "Description": description, "Date": None, "Creator": None}
    )


def draw_timeline(run_dir: Path, path: Path) -> None:
    """Sampling, one lane per batch under way; below it the learner, and whom the trainer waits for."""
    events = read_events(run_dir)
    mode = next(event["mode"] for event in events if event["event"] == "run")
    batches = sorted(batch_bars(events), key=lambda batch: batch.sampling.start)
    named = [batch for batch in batches if FIRST_STEP <= batch.step < FIRST_STEP + NUM_STEPS]
    window = Bar(named[0].sampling.start, max(batch.learner.end for batch in named if batch.learner))
    sampled = [batch for batch in batches if overlaps(batch.sampling, window)]
    chosen = lanes(batch.sampling for batch in sampled)
    num_lanes = max(chosen) + 1
    figure, (axis,) = new_figure(1.7 + 0.62 * num_lanes)

    def draw(bar: Bar, y: float, height: float, colour: str, alpha: float = 1.0) -> None:
        start, end = max(bar.start, window.start), min(bar.end, window.end)
        axis.barh(y, end - start, height, start - window.start, color=colour, alpha=alpha, linewidth=0)

    ticks = {}
    for batch, lane in zip(sampled, chosen, strict=True):
        colour, top, height = colour_of(batch.step), num_lanes - lane + 1.0, 0.64 / len(batch.groups)
        for index, group in enumerate(bar for bar in batch.groups if overlaps(bar, window)):
            draw(group, top - index * height, 0.8 * height, colour)
        left = max(batch.sampling.start - window.start, 0.0)
        axis.text(left, top + 0.16, f"batch {batch.step}", color=colour, va="bottom", clip_on=True)
        ticks[top - 0.28] = "sampling" if lane == 0 else ""
    for batch in batches:
        if batch.learner and overlaps(batch.learner, window):
            colour, end = colour_of(batch.step), batch.learner.end - window.start
            draw(batch.learner, 0.75, 0.5, colour, 0.45)
            axis.plot([end, end], [0.45, 1.05], color=colour, linewidth=2.5, solid_capstyle="butt")
            axis.text(end, 1.1, str(batch.step), color=colour, ha="center", va="bottom")
    ticks[0.75] = "learner"
    bottom = 0.75
    for for_bound, label in ((False, "waits for a batch"), (True, "waits for the bound")):
        waits = [wait.bar for wait in wait_bars(events) if wait.for_bound is for_bound and overlaps(wait.bar, window)]
        if waits:
            bottom -= 0.6 if bottom == 0.75 else 0.4
            ticks[bottom] = label
        for bar in waits:
            draw(bar, bottom, 0.2, BOUND if for_bound else INK)
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, window.end - window.start)
    axis.set_ylim(bottom - 0.25, num_lanes + 1.6)
    axis.set_xlabel("seconds")
    save(
        figure,
        path,
        f"Timeline of {mode}hronous training",
        f"Batches {named[0].step} to {named[-1].step} of a real run: when the groups of each batch were sampled, when "
        "the learner trained it, and when the trainer waited. All lengths are measured.",
    )


def draw_pinning(run_dirs: Sequence[Path], path: Path) -> None:
    """The longest trajectories of each run, turn by turn in the colour of their policy; updates as vertical lines."""
    figure, axes = new_figure(1.2 + 0.32 * NUM_TRAJECTORIES * len(run_dirs), len(run_dirs))
    for axis, run_dir, policy in zip(axes, run_dirs, ("trajectory", "segment"), strict=True):
        events = read_events(run_dir)
        turns, updates = turn_bars(events), update_times(events)
        shown = crossing(turns, updates)[:NUM_TRAJECTORIES]
        shown.sort(key=lambda name: turns[name][0].sampling.start)
        left = min(turns[name][0].sampling.start for name in shown)
        right = max(turns[name][-1].end for name in shown)
        for row, name in enumerate(shown):
            for turn in turns[name]:
                colour = colour_of(turn.version)
                start = turn.sampling.start - left
                axis.barh(-row, turn.end - turn.sampling.start, 0.3, start, color=colour, alpha=0.5, linewidth=0)
                length = turn.sampling.end - turn.sampling.start
                axis.barh(-row, length, 0.7, start, color=colour, edgecolor=colour, linewidth=1)
            first = turns[name][0]
            axis.text(first.sampling.start - left, -row + 0.4, f"{first.version}", fontsize=8, color=INK, va="bottom")
        for version, time in updates:
            if left <= time <= right:
                axis.axvline(time - left, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
                axis.text(time - left, 0.9, f"v{version}", ha="center", va="bottom", fontsize=8)
        axis.set_yticks([-row for row in range(len(shown))], shown)
        axis.tick_params(axis="y", length=0)
        axis.set_xlim(0, right - left)
        axis.set_ylim(-len(shown) + 0.4, 1.0)
        axis.set_title(f'sampling_policy="{policy}"', loc="left", fontsize=10, color=INK, pad=16)
    axes[-1].set_xlabel("seconds")
    save(
        figure,
        path,
        "Trajectory and segment pinning",
        "The turns of long trajectories of two real runs, coloured by the policy version that sampled them. Pinned by "
        "trajectory, a row keeps its colour over all updates; by segment, later turns take newer colours.",
    )


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["timeline", run_dir, path]:
            draw_timeline(Path(run_dir), Path(path))
        case ["pinning", trajectory, segment, path]:
            draw_pinning([Path(trajectory), Path(segment)], Path(path))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
