"""The registry of metrics is the one place where a key is defined, and docs/metrics.md is written from it."""

from pathlib import Path

import pytest

from pipeline.metrics import METRICS
from tests.defined_metrics import metric_of

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_every_key_has_one_definition_with_a_unit_on_one_line():
    keys = [metric.key for metric in METRICS]
    assert len(keys) == len(set(keys))
    for metric in METRICS:
        assert metric.unit and metric.meaning and "\n" not in metric.meaning
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for key in keys:
        assert sum(line.startswith(f"| `{key}` | ") for line in lines) == 1, key


@pytest.mark.parametrize(
    ("key", "definition"),
    [
        ("reward/mean", "reward/mean"),
        ("truncated/turns", "truncated/<cause>"),
        ("time/trainer_busy_seconds", "time/trainer_busy_seconds"),
        ("time/sampler-0_busy_seconds", "time/<process>_busy_seconds"),
        ("memory/environment-1_bytes", "memory/<process>_bytes"),
        ("staleness/wait_seconds", "staleness/wait_seconds"),
        ("staleness/wait_seconds/tool", "staleness/wait_seconds/<cause>"),
    ],
)
def test_a_key_is_found_by_name_or_by_its_family(key, definition):
    assert metric_of(key).key == definition


def test_unknown_keys_are_in_no_family():
    assert metric_of("reward/median") is None and metric_of("truncated/") is None
