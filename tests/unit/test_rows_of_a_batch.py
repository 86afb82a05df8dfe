"""A row's tokens and log-probs are its own: alone, beside others, and while others come and go (case HR23)."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.engine_twin import CONFIG, SEED, drain, request
from workers.generation.engine import Engine
from workers.generation.engine_requests import FinishedSegment
from workers.model import bind_weights, init_flat
from workers.model_config import ModelConfig

CASE = Path(__file__).parent.parent / "data" / "cases" / "HR23" / "prompts.json"
PROMPTS: list[list[int]] = json.loads(CASE.read_text(encoding="utf-8"))
MORE = [[5], list(range(1, 60)), [8] * 33, [60, 0] * 10]  # lengths further apart than the case's
NUM_NEW = 16
MODELS = {
    "full": CONFIG,
    "windows": replace(CONFIG, layer_windows=(4, 0), nope_layers=(1,)),
    "long_windows": replace(CONFIG, layer_windows=(20, 20), qk_norm=False, qkv_bias=True),
}


def make_engine(config: ModelConfig, **options) -> Engine:
    # top_k=1 is greedy, and the log-probs are those of the full distribution; at temperature 0 each would be 0.
    engine = Engine(config, seed=SEED, kv_tokens=2000, max_batch_tokens=64, **({"top_k": 1} | options))
    flat = init_flat(config, seed=3)
    for tensor in bind_weights(flat, config).named.values():
        if tensor.dim() == 2:
            tensor.mul_(4.0)  # far from uniform, so that no two tokens tie
    engine.set_weights(0, bind_weights(flat, config))
    return engine


def alone(config: ModelConfig, prompts: list[list[int]], **options) -> list[FinishedSegment]:
    return [one_alone(config, number, tuple(prompt), **options) for number, prompt in enumerate(prompts)]


@cache
def one_alone(config: ModelConfig, number: int, prompt: tuple[int, ...], **options) -> FinishedSegment:
    engine = make_engine(config, **options)
    engine.add(request(number, prompt, NUM_NEW))
    (segment,) = drain(engine, 1)
    return segment


def assert_same(found: list[FinishedSegment], expected: list[FinishedSegment]) -> None:
    by_request = {segment.request: segment for segment in expected}
    for segment in found:
        one = by_request[segment.request]
        assert segment.tokens.tolist() == one.tokens.tolist() and len(one.tokens) == NUM_NEW
        np.testing.assert_allclose(segment.logprobs, one.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS + MORE], ids=["case", "more"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_unequal_rows_decodes_each_as_if_it_were_alone(name, prompts):
    expected = alone(MODELS[name], prompts)
    assert len({tuple(segment.tokens) for segment in expected}) == len(prompts)
    assert all((segment.logprobs < -1e-3).any() for segment in expected)
    engine = make_engine(MODELS[name])
    for number, prompt in enumerate(prompts):
        engine.add(request(number, prompt, NUM_NEW))
    assert_same(drain(engine, len(prompts)), expected)


@pytest.mark.parametrize("after", [0, 1, 4, 15])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_leaves_in_mid_decode_changes_nothing_for_the_others(name, after):
    engine = make_engine(MODELS[name])
    for number, prompt in enumerate(PROMPTS):
        engine.add(request(number, prompt, NUM_NEW))
    for _ in range(after):
        assert engine.step() == []
    assert engine.release(1, 0) == 1  # row 1 is cancelled
    found = drain(engine, 2)
    assert [segment.request for segment in found] == [0, 2]
    assert_same(found, alone(MODELS[name], PROMPTS))


@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_joins_in_mid_decode_changes_nothing_for_the_others(name):
    prompts = PROMPTS + MORE
    engine, found = make_engine(MODELS[name]), []
    for number, prompt in enumerate(prompts):
        engine.add(request(number, prompt, NUM_NEW))
        for _ in range(3):
            found += engine.step()
    assert_same(found + drain(engine, len(prompts) - len(found)), alone(MODELS[name], prompts))


def test_sampled_rows_are_their_own_as_well():
    expected = alone(CONFIG, PROMPTS, top_k=0)
    engine = make_engine(CONFIG, top_k=0)
    for number, prompt in enumerate(PROMPTS):
        engine.add(request(number, prompt, NUM_NEW))
    assert_same(drain(engine, 3), expected)
