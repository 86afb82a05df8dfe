"""Which entry of the registry of metrics defines a key."""

import re
from functools import cache

from pipeline.metrics import METRICS, Metric


@cache
def metric_of(key: str) -> Metric | None:
    """One that names it exactly before a family."""
    exact = [metric for metric in METRICS if metric.key == key]
    families = [metric for metric in METRICS if re.fullmatch(_pattern(metric), key)]
    return next(iter(exact + families), None)


def _pattern(metric: Metric) -> str:
    """`<name>` stands for any text."""
    return "".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", metric.key))
