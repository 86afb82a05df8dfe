"""Tool latencies: forms, distributions, errors."""

import math
import random
import statistics

import pytest

from pipeline.errors import ConfigError
from pipeline.tasks.latency import parse_latency


def test_none_takes_no_time():
    latency = parse_latency("none")
    assert latency.sample(random.Random(0)) == 0.0


def test_fixed_takes_the_same_milliseconds_each_time():
    latency = parse_latency("fixed:12.5")
    rng = random.Random(0)
    assert [latency.sample(rng) for _ in range(3)] == [0.0125] * 3


def test_lognormal_has_the_median_and_the_spread_it_names():
    latency = parse_latency("lognormal:50:1.0")
    rng = random.Random(3)
    logs = [math.log(latency.sample(rng)) for _ in range(20_000)]
    assert abs(statistics.mean(logs) - math.log(0.050)) < 0.03  # 4 standard errors: 4 / sqrt(20000)
    assert abs(statistics.stdev(logs) - 1.0) < 0.02


def test_equal_seeds_give_equal_latencies():
    latency = parse_latency("lognormal:50:1.0")
    first, second = random.Random(8), random.Random(8)
    assert [latency.sample(first) for _ in range(5)] == [latency.sample(second) for _ in range(5)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "It must be none, fixed:MS or lognormal"),
        ("normal:5:1", "It must be none, fixed:MS or lognormal"),
        ("fixed", "has 0 numbers. fixed takes 1"),
        ("none:3", "has 1 numbers. none takes 0"),
        ("lognormal:50", "has 1 numbers. lognormal takes 2"),
        ("lognormal:50:1:2", "has 3 numbers. lognormal takes 2"),
        ("fixed:fast", "'fast' for the milliseconds"),
        ("fixed:-1", "'-1' for the milliseconds"),
        ("fixed:inf", "'inf' for the milliseconds"),
        ("lognormal:50:nan", "'nan' for the sigma"),
    ],
)
def test_other_texts_are_refused_with_what_is_wrong(text, fault):
    with pytest.raises(ConfigError, match=fault) as refused:
        parse_latency(text)
    assert repr(text) in str(refused.value)
