"""When evaluations are launched, what an Evaluator refuses, its share, and which training rows it takes away."""

import asyncio
import functools
from dataclasses import replace

import pytest

import pipeline as rl
from pipeline.data.split_rows import without_holdout
from pipeline.evaluation.evaluations import summarize
from pipeline.trajectory import Span, Trajectory
from tests import vectors

ROWS = [{"number": 1}, {"number": 2}]


@pytest.mark.parametrize("vector", vectors.load("evaluation"))
def test_launches(vector):
    sizes = {name: vector[name] for name in ("every", "group_size", "final_group_size")}
    evaluator = rl.Evaluator(ROWS, **sizes)
    launched = []
    for batches in range(vector["steps"] + 1):
        size = evaluator.trajectories_per_row(batches, at_end=batches == vector["steps"])
        if size:
            launched.append([batches, size])
    assert launched == vector["expected"]


def test_without_a_final_size_the_last_batch_has_the_evaluation_that_is_due_then():
    evaluator = rl.Evaluator(ROWS, every=2, group_size=3, final_group_size=0)
    assert [evaluator.trajectories_per_row(4, at_end=at_end) for at_end in (False, True)] == [3, 3]
    assert evaluator.trajectories_per_row(5, at_end=True) == 0


class AsyncSink:
    async def __call__(self, *results): ...


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"holdout": []}, rl.ConfigError, "Evaluator.holdout is empty"),
        ({"holdout": "rows"}, rl.ConfigTypeError, "Evaluator.holdout is str"),
        ({"holdout": [3]}, rl.ConfigTypeError, "Holdout row 0 is 3"),
        ({"holdout": [{"n": 1}, {"n": {2}}]}, rl.ConfigTypeError, r"Holdout row 1 has \{2\} as its 'n'"),
        ({"every": -1}, rl.ConfigError, "Evaluator.every is -1"),
        ({"every": 1.5}, rl.ConfigError, "Evaluator.every is 1.5"),
        ({"group_size": 0}, rl.ConfigError, "Evaluator.group_size is 0"),
        ({"final_group_size": -1}, rl.ConfigError, "Evaluator.final_group_size is -1"),
        ({"every": 0, "final_group_size": 0}, rl.ConfigError, "both 0, so nothing would ever be evaluated"),
        ({"sink": 3}, rl.ConfigTypeError, "Evaluator.sink is 3"),
        ({"sink": asyncio.sleep}, rl.ConfigTypeError, "give a plain function"),
        ({"sink": AsyncSink()}, rl.ConfigTypeError, "give a plain function"),
        ({"sink": functools.partial(AsyncSink(), None)}, rl.ConfigTypeError, "give a plain function"),
    ],
)
def test_refusals(options, error, part):
    with pytest.raises(error, match=part):
        rl.Evaluator(**({"holdout": ROWS} | options))


@pytest.mark.parametrize(
    ("concurrency", "max_requests", "share"),
    [(256, None, 64), (192, 16, 4), (7, None, 1), (4, None, 1), (1, None, 1), (64, 1, 1)],
)
def test_share_is_a_quarter_of_the_trajectories_and_of_the_requests(concurrency, max_requests, share):
    schedule = rl.Schedule(concurrency=concurrency, max_sample_requests=max_requests)
    assert schedule.evaluation_concurrency == share


def test_rows_of_equal_content_are_taken_out_of_training():
    rows = [{"a": 1, "b": [1, {"c": b"x"}]}, {"a": 2}, {"a": float("nan")}, {"a": 3}, {"a": 2, "b": None}, {"a": 2}]
    holdout = [{"b": (1, {"c": bytearray(b"x")}), "a": 1.0}, {"a": 2}, {"a": float("nan")}]
    assert without_holdout(rows, holdout) == [{"a": 3}, {"a": 2, "b": None}]


def test_texts_are_told_from_the_numbers_and_lists_that_they_name():
    rows = [{"a": "1"}, {"a": [1]}, {"a": {"0": 1}}, {"a": "NaN"}]
    assert without_holdout(rows, [{"a": 1}, {"a": {0: 1}}, {"a": float("nan")}, {"a": [[1]]}]) == rows


def trajectory(reward, tokens, truncated=None):
    spans = [Span("prompt", [1, 2]), Span("generated", [3] * tokens, 5, 5, [-0.5] * tokens)]
    return Trajectory(-1, 0, 0, spans, reward=reward, truncated=truncated)


def test_measures_of_an_evaluation():
    first = [trajectory(1.0, 2), trajectory(0.0, 4, "turns")]
    second = [trajectory(0.25, 6), trajectory(0.75, 8, "context")]
    second = [replace(one, group=-2, row=1) for one in second]
    evaluation = summarize([*second, *first], version=5, batch=6, rows=[{"id": "a"}, {"id": 1.5}], seconds=1.5)
    assert (evaluation.version, evaluation.batch, evaluation.rows, evaluation.trajectories) == (5, 6, 2, 4)
    assert evaluation.reward_mean == 0.5
    assert evaluation.reward_std == pytest.approx((0.625 / 4) ** 0.5)  # sqrt((0.25 + 0.25 + 0.0625 + 0.0625) / 4)
    assert evaluation.row_rewards == ({"row": 0, "id": "a", "reward_mean": 0.5}, {"row": 1, "reward_mean": 0.5})
    assert (evaluation.generated_tokens_mean, evaluation.truncated_frac, evaluation.seconds) == (5.0, 0.5, 1.5)


def test_an_evaluation_that_sampled_no_token_is_no_result():
    long = Trajectory(-1, 0, 0, [Span("prompt", [1] * 9)], reward=0.0, truncated="context")
    with pytest.raises(rl.RunError, match=r"The evaluation of version 5 sampled no token.*\(9 tokens the longest\)"):
        summarize([long], version=5, batch=6, rows=[{}], seconds=1.5)
