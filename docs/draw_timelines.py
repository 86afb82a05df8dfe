"""Draw the pictures of docs/async.md from the events.jsonl of real runs: two timelines, and two sampling policies.

    pip install -e '.[plots]'
    SAME="--tool-latency lognormal:10:1.0 --steps 20"
    python run.py --config recipes/guess-sync.toml $SAME --run-dir runs/sync
    python run.py --config recipes/guess-async.toml $SAME --run-dir runs/async
    python docs/draw_timelines.py timeline runs/sync docs/images/sync.svg
    python docs/draw_timelines.py timeline runs/async docs/images/async.svg
    LONG="$SAME --max-staleness 4 --admit-ahead 4 --concurrency 320"
    python run.py --config recipes/guess-async.toml $LONG --run-dir runs/trajectory
    python run.py --config recipes/guess-async.toml $LONG --sampling-policy segment --kv-max-staleness 4 \\
        --run-dir runs/segment
    python docs/draw_timelines.py pinning runs/trajectory runs/segment docs/images/pinning.svg

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


def choose_trajectories(turns: Mapping[str, Sequence[TurnBar]], updates: Sequence[tuple[int, float]]) -> list[str]:
    """The trajectory over the most updates, and others beside it in time: at most two that began with one version.

    By start. Of several, those over more updates go first, then longer ones, then by name. Empty when no trajectory of
    at least two turns went on over an update.
    """

    def span(name: str) -> Bar:
        return Bar(turns[name][0].sampling.start, turns[name][-1].end)

    def rank(name: str) -> tuple[int, float, str]:
        bar = span(name)
        return -sum(bar.start < time < bar.end for _, time in updates), bar.start - bar.end, name

    ranked = sorted((name for name, bars in turns.items() if len(bars) > 1 and rank(name)[0] < 0), key=rank)
    chosen: list[str] = []
    for name in ranked:
        version = turns[name][0].version
        num_alike = sum(turns[other][0].version == version for other in chosen)
        if overlaps(span(name), span(ranked[0])) and num_alike < 2 and len(chosen) < NUM_TRAJECTORIES:
            chosen.append(name)
    return sorted(chosen, key=lambda name: span(name).start)


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
        if left < 0.93 * (window.end - window.start):  # or there is no room for it
            axis.text(left, top + 0.16, f"batch {batch.step}", color=colour, va="bottom")
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
    """Long trajectories of each run, turn by turn in the colour of their policy; updates as vertical lines."""
    figure, axes = new_figure(1.6 + 0.32 * NUM_TRAJECTORIES * len(run_dirs), len(run_dirs))
    longest = 0.0
    for axis, run_dir, policy in zip(axes, run_dirs, ("trajectory", "segment"), strict=True):
        events = read_events(run_dir)
        turns, updates = turn_bars(events), update_times(events)
        shown = choose_trajectories(turns, updates)
        if not shown:
            raise SystemExit(f"In {run_dir} no trajectory goes on over an update; give a run with a slower tool.")
        window = Bar(min(turns[name][0].sampling.start for name in shown), max(turns[name][-1].end for name in shown))
        longest = max(longest, window.end - window.start)
        for row, name in enumerate(shown):
            before = None
            for turn in turns[name]:
                colour, start = colour_of(turn.version), turn.sampling.start - window.start
                axis.barh(-row, turn.end - turn.sampling.start, 0.22, start, color=colour, alpha=0.6, linewidth=0)
                length = turn.sampling.end - turn.sampling.start
                axis.barh(-row, length, 0.5, start, color=colour, edgecolor=colour, linewidth=1)
                if turn.version != before:
                    axis.text(start, -row + 0.24, str(turn.version), fontsize=8, color=colour, va="bottom")
                before = turn.version
        for version, time in updates:
            if window.start <= time <= window.end:
                axis.axvline(time - window.start, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
                axis.text(time - window.start, 0.85, str(version), ha="center", va="bottom", fontsize=8)
        axis.set_yticks([-row for row in range(len(shown))], shown)
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(-len(shown) + 0.4, 0.8)
        axis.set_title(f'sampling_policy="{policy}"', loc="left", fontsize=10, color=INK, pad=16)
    for axis in axes:
        axis.set_xlim(0, longest)
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
