"""The `sampling/*` metrics: sums over an interval, averages over time, gauges at its end."""

import pytest

from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.sampling_counters import SamplingCounters


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def segment(tokens, cached, **evicted):
    return SegmentResult([1] * tokens, [0.0] * tokens, 3, 3, cached, True, seconds=0.5, queue_seconds=0.125, **evicted)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def counters(clock):
    return SamplingCounters(clock)


def test_segments_are_summed_and_forgotten_with_the_interval(counters, clock):
    counters.add_segment(segment(tokens=6, cached=8, evictions=2, dropped=3), context_tokens=10)
    counters.add_segment(segment(tokens=2, cached=0, evictions=1), context_tokens=30)
    counters.add_tool(0.5, failed=False)
    counters.add_tool(0.25, failed=True)
    counters.cut_results += 1
    clock.now += 4.0
    metrics = counters.take()
    assert metrics["sampling/requests"] == metrics["sampling/prompts"] == 2
    assert metrics["sampling/generated_tokens"] == 8
    assert metrics["sampling/prompt_tokens"] == 40
    assert metrics["sampling/cached_prompt_tokens"] == 8
    assert metrics["sampling/cached_prompt_fraction"] == 0.2  # 8 of 40
    assert (metrics["sampling/evictions"], metrics["sampling/dropped_tokens"]) == (3, 3)
    assert metrics["sampling/request_seconds"] == 1.0
    assert metrics["sampling/queue_seconds"] == 0.25
    assert metrics["sampling/interval_seconds"] == 4.0
    assert metrics["sampling/generated_tokens_per_second"] == 2.0  # 8 in 4 s
    assert metrics["env/tool_seconds"] == 0.75
    assert (metrics["env/tool_calls"], metrics["env/tool_errors"], metrics["env/tool_results_cut"]) == (2, 1, 1)

    clock.now += 1.0
    following = counters.take()
    assert following["sampling/interval_seconds"] == 1.0
    for name in (
        "requests",
        "prompts",
        "generated_tokens",
        "prompt_tokens",
        "request_seconds",
        "queue_seconds",
        "evictions",
    ):
        assert following[f"sampling/{name}"] == 0
    for name in ("tool_seconds", "tool_calls", "tool_errors", "tool_results_cut"):
        assert following[f"env/{name}"] == 0


def test_cached_fraction_is_told_only_when_there_was_a_prompt(counters, clock):
    clock.now += 1.0
    assert "sampling/cached_prompt_fraction" not in counters.take()


def test_concurrency_is_averaged_over_time_and_goes_on_into_the_next_interval(counters, clock):
    counters.change_active(+1)
    counters.change_active(+1)
    clock.now += 3.0
    counters.change_active(-1)
    clock.now += 1.0
    metrics = counters.take()
    assert metrics["sampling/concurrency_mean"] == 1.75  # (2 * 3 + 1 * 1) / 4
    assert metrics["sampling/inflight_trajectories"] == 1
    clock.now += 2.0
    assert counters.take()["sampling/concurrency_mean"] == 1.0


def test_inflight_requests_are_a_gauge(counters, clock):
    counters.inflight = 5
    clock.now += 1.0
    assert counters.take()["sampling/inflight_requests"] == 5
    clock.now += 1.0
    assert counters.take()["sampling/inflight_requests"] == 5


def test_interval_without_length_divides_by_nothing(counters):
    metrics = counters.take()
    assert metrics["sampling/generated_tokens_per_second"] == 0.0
