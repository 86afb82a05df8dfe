"""The engine's edges: memory that ends, requests that are cancelled or refused, versions in use, broken weights."""

import numpy as np
import pytest
import torch

from tests.engine_twin import (
    CONFIG,
    WEIGHTS,
    assert_like_full_forward,
    drain,
    free_all,
    make_engine,
    random_context,
    request,
    run,
)
from workers.errors import NonFiniteError
from workers.generation.engine_requests import EngineError, EngineRequest
from workers.model import bind_weights


def test_running_requests_are_taken_back_and_computed_again_when_memory_ends():
    rng = np.random.default_rng(13)
    asked = [request(i, random_context(rng, 10), 25, version=i % 2) for i in range(8)]
    engine = make_engine(kv_tokens=70, max_batch_tokens=16)
    engine._store.pool[1:] = float("nan")
    finished = run(engine, *asked)
    assert sum(segment.evictions for segment in finished) > 0 == sum(segment.dropped for segment in finished)
    for one, segment in zip(asked, finished, strict=True):
        assert_like_full_forward(one, segment)
    free_all(engine, asked, kv_tokens=70)


def test_a_group_under_memory_pressure_equals_full_forward():
    rng = np.random.default_rng(14)
    prompts = [random_context(rng, 14) for _ in range(3)]
    asked = [request(i, prompts[i // 4], 18, group=i // 4, member=i % 4) for i in range(12)]
    engine = make_engine(kv_tokens=64, max_batch_tokens=10)
    finished = run(engine, *asked)
    for one, segment in zip(asked, finished, strict=True):
        assert_like_full_forward(one, segment)
    assert sum(segment.evictions for segment in finished) > 0
    free_all(engine, asked, kv_tokens=64)


def test_idle_kv_is_evicted_and_computed_again():
    rng = np.random.default_rng(15)
    contexts = [random_context(rng, 20) for _ in range(5)]
    engine, last = make_engine(kv_tokens=60), []
    for turn in range(3):
        for group in range(5):
            asked = request(10 * turn + group, contexts[group], 4, group=group, generated=4 * turn)
            (segment,) = run(engine, asked)
            assert segment.cached == 0  # the others have pushed it out since its last turn
            assert_like_full_forward(asked, segment)
            contexts[group] = np.concatenate((contexts[group], segment.tokens))
            last.append(asked)
    free_all(engine, last, kv_tokens=60)


def test_releasing_a_running_request_cancels_it_and_frees_its_kv():
    prompt = random_context(np.random.default_rng(16), 30)
    asked = [request(i, prompt, 6, group=0, member=i) for i in range(3)]
    engine = make_engine(max_batch_tokens=8)
    for one in asked:
        engine.add(one)
    engine.step()  # the first member is amid the prompt that the others wait for
    assert engine.release(0, 0) == 0
    for one, segment in zip(asked[1:], drain(engine, 2), strict=True):
        assert_like_full_forward(one, segment)
    assert engine.release(0, 0) is None
    free_all(engine, asked)


def test_releasing_a_waiting_request_cancels_it():
    engine = make_engine(kv_tokens=30)
    context = random_context(np.random.default_rng(17), 20)
    engine.add(request(0, context))
    engine.add(request(1, context))
    engine.step()
    assert engine.release(1, 0) == 1
    assert [segment.request for segment in drain(engine, 1)] == [0]


def test_a_request_that_can_never_fit_is_refused():
    engine = make_engine(kv_tokens=40)
    context = random_context(np.random.default_rng(18), 30)
    with pytest.raises(EngineError, match="needs 41 tokens .* room for 40"):
        engine.add(request(0, context, 12))
    assert not engine.has_work
    (segment,) = run(engine, request(1, context, 11))  # 40: the last token is never fed back
    assert len(segment.tokens) == 11
    with pytest.raises(EngineError, match="position table has room for 2048"):
        make_engine(kv_tokens=5000).add(request(2, context, 2020))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (request(0, [1, 2], version=9), "asks for version 9"),
        (request(0, []), "0 context tokens"),
        (request(0, [1], 0), "max_tokens 0"),
        (request(0, [1, 61]), "from 1 to 61"),
        (request(0, [-1, 3]), "from -1 to 3"),
        (EngineRequest(0, 0, 0, 0, np.array([1, 2]), 3, 0), "int64 token ids"),
    ],
)
def test_a_malformed_request_is_refused(broken, message):
    engine = make_engine()
    with pytest.raises(EngineError, match=message):
        engine.add(broken)
    assert not engine.has_work and engine._cache.pool.num_free == 2000


def test_a_trajectory_has_one_request_at_a_time():
    engine = make_engine()
    engine.add(request(0, [1, 2], group=5))
    with pytest.raises(EngineError, match="one request at a time"):
        engine.add(request(1, [1, 2], group=5))
    drain(engine, 1)


def test_a_version_in_use_can_not_be_dropped():
    engine = make_engine()
    engine.add(request(0, [1, 2, 3], version=1))
    for _ in range(2):  # waiting, then running
        with pytest.raises(EngineError, match="1 requests still need it"):
            engine.drop_version(1)
        engine.step()
    drain(engine, 1)
    engine.drop_version(1)
    with pytest.raises(EngineError, match="can't be dropped"):
        engine.drop_version(1)
    with pytest.raises(EngineError, match="asks for version 1"):
        engine.add(request(1, [1, 2, 3], version=1))


def test_a_dropped_version_that_comes_back_goes_on_over_its_kv():
    engine = make_engine()
    first = request(0, [1, 2, 3], version=1)
    (segment,) = run(engine, first)
    engine.drop_version(1)
    engine.set_weights(1, WEIGHTS[1])
    asked = request(1, [1, 2, 3, *segment.tokens, 9], group=0, version=1, generated=6)
    (segment,) = run(engine, asked)
    assert segment.cached == 8
    assert_like_full_forward(asked, segment)


def test_weights_of_a_version_are_set_once():
    with pytest.raises(EngineError, match="has weights already"):
        make_engine().set_weights(0, WEIGHTS[1])


def test_broken_weights_are_named_and_nothing_is_returned():
    engine = make_engine()
    flat = torch.full((sum(tensor.numel() for tensor in WEIGHTS[0].named.values()),), float("nan"))
    engine.set_weights(9, bind_weights(flat, CONFIG))
    engine.add(request(0, [1, 2, 3], version=9))
    with pytest.raises(NonFiniteError, match="Version 9"):
        drain(engine, 1)


def test_times_are_sane():
    (segment,) = run(make_engine(), request(0, [1, 2, 3]))
    assert segment.seconds > 0 and segment.queue_seconds >= 0
