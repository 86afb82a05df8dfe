"""The pictures of docs/async.md: from events to bars, and a drawing where matplotlib is installed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw_timelines", ROOT / "docs" / "draw_timelines.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def event(t, name, **fields):
    return {"t": t, "event": name} | fields


# Two groups of two members; group 1 begins before batch 1 is trained, and is held back for a while by a tool.
EVENTS = [
    event(0.0, "run", mode="async"),
    event(1.0, "started", trajectory="0.0", group=0, version=0),
    event(1.1, "started", trajectory="0.1", group=0, version=0),
    event(1.5, "segment", trajectory="0.0", group=0, version=0, seconds=0.25),
    event(2.0, "trajectory", trajectory="0.0", group=0),
    event(2.0, "started", trajectory="1.0", group=1, version=0),
    event(2.5, "segment", trajectory="1.0", group=1, version=0, seconds=0.5),
    event(3.0, "trajectory", trajectory="0.1", group=0),
    event(3.0, "ready", group=0),
    event(3.0, "wait", step=1, seconds=2.0, why="ready"),
    event(3.1, "batch", step=1, groups=[0]),
    event(3.5, "optim", step=1),
    event(3.5, "published", version=1),
    event(4.0, "wait", step=2, seconds=0.5, why="tool"),
    event(4.5, "segment", trajectory="1.0", group=1, version=1, seconds=0.5),
    event(5.0, "trajectory", trajectory="1.0", group=1),
    event(5.0, "ready", group=1),
    event(5.1, "batch", step=2, groups=[1]),  # no gradient: nothing is published
]


def test_batch_is_sampled_from_its_first_start_to_its_last_group_and_trained_until_it_is_published(draw):
    first, second = draw.batch_bars(EVENTS)
    assert first == draw.BatchBars(1, (draw.Bar(1.0, 3.0),), draw.Bar(3.1, 3.5))
    assert second == draw.BatchBars(2, (draw.Bar(2.0, 5.0),), None)
    both = draw.BatchBars(3, first.groups + second.groups, None)
    assert both.sampling == draw.Bar(1.0, 5.0)


def test_wait_ends_when_its_event_is_written_and_says_whether_it_is_the_bound(draw):
    assert draw.wait_bars(EVENTS) == [
        draw.WaitBar(draw.Bar(1.0, 3.0), for_bound=False),
        draw.WaitBar(draw.Bar(3.5, 4.0), for_bound=True),
    ]


def test_turn_lasts_until_the_next_request_or_the_end(draw):
    turns = draw.turn_bars(EVENTS)
    assert turns["0.0"] == [draw.TurnBar(0, draw.Bar(1.25, 1.5), 2.0)]
    assert turns["0.1"] == []
    assert turns["1.0"] == [draw.TurnBar(0, draw.Bar(2.0, 2.5), 4.0), draw.TurnBar(1, draw.Bar(4.0, 4.5), 5.0)]


def test_trajectories_over_many_updates_are_shown_with_others_of_their_time(draw):
    def turns(version, *times):
        bars = zip(times, times[1:], strict=False)
        return [draw.TurnBar(version, draw.Bar(start, start), end) for start, end in bars]

    found = {
        "three updates": turns(3, 1, 5, 9),
        "begins earlier": turns(3, 0, 5, 6),  # two updates
        "third of its version": turns(3, 2, 3, 5),  # two, but shorter
        "of another version": turns(4, 3, 4, 5),  # one
        "no update": turns(4, 2.5, 2.6, 2.7),
        "one turn": turns(5, 1, 9),
        "later": turns(6, 11, 12, 13),
    }
    updates = [(4, 2.2), (5, 4.0), (6, 8.0), (7, 12.0)]
    assert draw.choose_trajectories(found, updates) == ["begins earlier", "three updates", "of another version"]
    assert draw.choose_trajectories(found, []) == []


def test_bars_share_a_lane_only_one_after_the_other(draw):
    bars = [draw.Bar(0, 3), draw.Bar(1, 2), draw.Bar(2, 4), draw.Bar(3, 5)]
    assert draw.lanes(bars) == [0, 1, 1, 0]


def test_pictures_are_text_and_the_same_each_time(draw, tmp_path):
    pytest.importorskip("matplotlib", reason="the pictures need the extra [plots]")
    draw.FIRST_STEP = 1
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in EVENTS), "utf-8")
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        draw.main(["timeline", str(tmp_path), str(path)])
    one, two = (path.read_text("utf-8") for path in paths)
    assert one == two
    for text in ("<title>Timeline of asynchronous training</title>", "batch 1", "waits for a batch"):
        assert text in one
    draw.main(["pinning", str(tmp_path), str(tmp_path), str(paths[0])])
    pinning = paths[0].read_text("utf-8")
    for text in (
        'sampling_policy="trajectory"',
        'sampling_policy="segment"',
        ">1.0<",
    ):  # the trajectory over the update
        assert text.replace('"', "&quot;") in pinning or text in pinning


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("sync", "Timeline of synchronous training"),
        ("async", "Timeline of asynchronous training"),
        ("pinning", "Trajectory and segment pinning"),
    ],
)
def test_picture_in_the_docs_is_small_and_says_what_it_shows(name, title):
    svg = (ROOT / "docs" / "images" / f"{name}.svg").read_text("utf-8")
    assert len(svg) < 100_000
    assert f"<title>{title}</title>" in svg
