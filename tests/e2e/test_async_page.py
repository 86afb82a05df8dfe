"""docs/async.md as a user follows it: its Python blocks as one script, its shell blocks in a checkout.

The page's runs are longer than a test's. There is one way to shorten them: a number after `STEPS = ` or `--steps ` in a
block is replaced by TEST_STEPS. Nothing else of a block is changed.
"""

import csv
import json
import re

import pytest

from pipeline import audit
from tests.e2e import page_runner

PAGE = page_runner.read_page("async.md")
TEST_STEPS = 2  # enough for an age: the second batch is begun at the first version
# What a run of each part of the page trains with, by its config.json.
SHOWN = [
    (lambda config: config["stale_policy"], "mask_span"),
    (
        lambda config: config["forward_backward_batch"],
        {"class": "ForwardBackwardBatch", "min_sequences": 16, "min_tokens": 65_536},
    ),
    (lambda config: config["engine"]["kv_cache"]["max_staleness"], 1),
    (lambda config: config["engine"]["kv_cache"]["on_limit"], "refill"),
    (lambda config: config["completion"]["mode"], "deadline"),
]


def blocks(language):
    """The page's blocks, shortened."""
    texts = [text for _, text in page_runner.blocks(PAGE, language)]
    return [re.sub(r"(STEPS = |--steps )\d+", rf"\g<1>{TEST_STEPS}", text) for text in texts]


@pytest.fixture
def checkout(kept, tmp_path):
    page_runner.make_checkout(tmp_path)
    return tmp_path


def finished_runs(directory):
    """(`run` event, metrics lines, config.json) of each run, oldest first; each whole, and proved by the audit."""
    found = []
    for run_dir in sorted((directory / "runs").iterdir(), key=lambda path: path.stat().st_ctime_ns):
        events, metrics = (
            [json.loads(line) for line in (run_dir / name).read_text(encoding="utf-8").splitlines()]
            for name in ("events.jsonl", "metrics.jsonl")
        )
        assert (events[-1]["status"], len(metrics)) == ("completed", TEST_STEPS)
        assert audit.main(str(run_dir / "events.jsonl")) == 0
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["config"]
        found.append((events[0], metrics, config))
    return found


def test_python_blocks_run_as_one_script(checkout):
    script = "\n".join(blocks("python"))
    assert script.count(f"STEPS = {TEST_STEPS}") == 1
    page_runner.follow(script, "python", checkout)

    runs = finished_runs(checkout)
    assert len(runs) == script.count("rl.run(")
    (synchronous, sync_lines, _), (asynchronous, async_lines, _), *_ = runs
    assert (synchronous["max_staleness"], synchronous["concurrency"]) == (0, 64)
    assert (asynchronous["max_staleness"], asynchronous["concurrency"]) == (2, 192)
    assert synchronous.keys() == asynchronous.keys()
    assert max(line["staleness/span_age_max"] for line in sync_lines) == 0
    assert max(line["staleness/span_age_max"] for line in async_lines) > 0
    assert any(event["oversample_factor"] == 1.5 for event, _, _ in runs)
    for what, value in SHOWN:
        assert any(what(config) == value for _, _, config in runs), value

    with open(checkout / "metrics.csv", newline="") as file:
        logged = list(csv.DictReader(file))
    _, last_lines, _ = runs[-1]
    for line in last_lines:
        of_step = {row["name"]: float(row["value"]) for row in logged if int(row["step"]) == line["step"]}
        assert of_step | {name: value for name, value in line.items() if "/" in name} == of_step
    evaluated = [int(row["step"]) for row in logged if row["name"] == "holdout/reward_mean"]
    assert evaluated[0] == 0 and evaluated[-1] == last_lines[-1]["model_step"]


def test_shell_blocks_run_in_a_checkout(checkout):
    for block in blocks("bash"):
        page_runner.follow(block, "bash", checkout)
    bounds = [(event["mode"], event["max_staleness"], event["concurrency"]) for event, _, _ in finished_runs(checkout)]
    assert bounds == [("sync", 0, 64), ("async", 2, 192)]


def test_metrics_that_the_page_names_are_defined():
    defined = set(re.findall(r"`([a-z]+/[\w<>/]+)`", page_runner.read_page("metrics.md")))
    named = set(re.findall(r"`((?:train|sampling|staleness|groups|length|reward|eval)/[\w<>/]+)`", PAGE))
    assert named and named <= defined, named - defined
