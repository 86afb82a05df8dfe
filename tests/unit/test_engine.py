"""The engine against its slow twin: whatever is cached, cut, shared or batched, tokens and log-probs are the same."""

import numpy as np
import pytest
import torch

from tests.engine_twin import (
    CONFIG,
    SEED,
    WEIGHTS,
    assert_like_full_forward,
    free_all,
    full_forward,
    make_engine,
    random_context,
    request,
    run,
)
from workers.generation import kv_window
from workers.generation.engine import Engine
from workers.generation.engine_requests import EngineError
from workers.model import bind_weights


def test_cached_decoding_of_several_versions_equals_full_forward():
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 17, 40, 9, 90, 130, 5, 33]
    asked = [request(i, random_context(rng, n), 3 + i, version=i % 3) for i, n in enumerate(lengths)]
    engine = make_engine()
    for one, segment in zip(asked, run(engine, *asked), strict=True):
        assert len(segment.tokens) == one.max_tokens and not segment.stopped and segment.cached == 0
        assert_like_full_forward(one, segment)
    free_all(engine, asked)


def test_prefill_in_chunks_equals_full_forward():
    rng = np.random.default_rng(1)
    asked = [request(i, random_context(rng, n), 5, version=i % 2) for i, n in enumerate([30, 4, 1, 55, 23])]
    engine = make_engine(max_batch_tokens=7)
    for one, segment in zip(asked, run(engine, *asked), strict=True):
        assert_like_full_forward(one, segment)
    free_all(engine, asked)


def test_every_layer_of_a_pass_is_a_sign_of_life_and_tokens_are_counted():
    """So that a long prefill is not taken for a hang, and one that goes round without a token is no progress."""
    beats = []
    engine = make_engine(max_batch_tokens=7, beat=lambda: beats.append(1))
    asked = [request(0, list(range(20)), 3), request(1, [1, 2], 1, version=1)]
    for one in asked:
        engine.add(one)
    computed = []
    while engine.has_work:
        engine.step()
        computed.append((len(beats) // CONFIG.num_layers, engine.num_computed))
    # A pass for each version in the first step; 20 tokens of prefill in chunks of 7, then one at a time.
    assert computed == [(2, 7 + 2), (3, 14 + 2), (4, 20 + 2), (5, 21 + 2), (6, 22 + 2)]
    free_all(engine, asked)


def test_long_contexts_beside_short_ones_equal_full_forward(monkeypatch):
    monkeypatch.setattr(kv_window, "_MASK_CELLS", 1 << 14)  # long prefill in many blocks of queries
    monkeypatch.setattr(kv_window, "_LOAD_ROWS", 256)
    rng = np.random.default_rng(2)
    asked = [request(i, random_context(rng, n), 9) for i, n in enumerate([700, 3, 126, 127, 505, 64, 1])]
    engine = make_engine(max_batch_tokens=300)
    for one, segment in zip(asked, run(engine, *asked), strict=True):
        assert_like_full_forward(one, segment)
    free_all(engine, asked)


def test_requests_that_come_and_go_equal_full_forward():
    rng = np.random.default_rng(3)
    engine = make_engine()
    asked = [
        request(i, random_context(rng, int(rng.integers(1, 60))), int(rng.integers(1, 12)), version=i % 3)
        for i in range(60)
    ]
    finished, next_one = [], 0
    while len(finished) < len(asked):
        for _ in range(int(rng.integers(0, 5))):
            if next_one < len(asked):
                engine.add(asked[next_one])
                next_one += 1
        finished += engine.step()
    for segment in finished:
        assert_like_full_forward(asked[segment.request], segment)
    free_all(engine, asked)


def test_the_turns_of_a_trajectory_reuse_its_kv():
    rng = np.random.default_rng(4)
    engine = make_engine()
    context, generated = random_context(rng, 12), 0
    for turn in range(5):
        asked = request(turn, context, 4, group=7, generated=generated, version=1)
        (segment,) = run(engine, asked)
        assert_like_full_forward(asked, segment)
        assert segment.cached == (0 if turn == 0 else len(context) - 4)  # framing and the last sampled token are new
        context = np.concatenate((context, segment.tokens, random_context(rng, 3)))
        generated += 4
    free_all(engine, [asked])


def test_a_context_that_turns_elsewhere_keeps_only_the_common_prefix():
    rng = np.random.default_rng(5)
    engine = make_engine()
    context = random_context(rng, 20)
    run(engine, request(0, context, group=1))
    other = context.copy()
    other[8] = (other[8] + 1) % CONFIG.vocab_size
    asked = request(1, other, group=1, generated=6)
    (segment,) = run(engine, asked)
    assert segment.cached == 8
    assert_like_full_forward(asked, segment)


def test_cutting_a_turn_into_requests_changes_nothing():
    context = random_context(np.random.default_rng(6), 15)
    (whole,) = run(make_engine(), request(0, context, 12, group=3))
    engine, tokens, logprobs = make_engine(), [], []
    for cut in (1, 4, 2, 5):
        so_far = np.concatenate((context, np.array(tokens, dtype=np.int32)))
        (part,) = run(engine, request(0, so_far, cut, group=3, generated=len(tokens)))
        tokens += part.tokens.tolist()
        logprobs += part.logprobs.tolist()
    assert tokens == whole.tokens.tolist()
    np.testing.assert_allclose(logprobs, whole.logprobs, atol=1e-5, rtol=0)


def test_what_else_is_in_the_batch_changes_nothing():
    rng = np.random.default_rng(7)
    one = request(0, random_context(rng, 21), 10)
    (alone,) = run(make_engine(), one)
    crowd = [request(i, random_context(rng, 3 * i), 1 + i, version=i % 2) for i in range(1, 20)]
    beside = run(make_engine(max_batch_tokens=40), *crowd[:9], one, *crowd[9:])[0]
    assert beside.tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(beside.logprobs, alone.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("max_batch_tokens", [512, 9])
def test_a_group_prefills_its_prompt_once(max_batch_tokens):
    prompt = random_context(np.random.default_rng(8), 25)
    asked = [request(i, prompt, 5, group=4, member=i) for i in range(6)]
    engine = make_engine(max_batch_tokens=max_batch_tokens)
    finished = run(engine, *asked)
    assert [segment.cached for segment in finished] == [0, 24, 24, 24, 24, 24]
    assert len({tuple(segment.tokens) for segment in finished}) > 1  # members meet different noise
    for one, segment in zip(asked, finished, strict=True):
        assert_like_full_forward(one, segment)
    late = request(6, prompt, 5, group=4, member=6)
    (segment,) = run(engine, late)
    assert segment.cached == 24
    assert_like_full_forward(late, segment)
    free_all(engine, [*asked, late])


def test_members_with_different_prompts_share_what_is_common():
    rng = np.random.default_rng(9)
    prompt = random_context(rng, 20)
    asked = [request(0, prompt, group=2, member=0)]
    for member in (1, 2, 3):
        own = np.concatenate((prompt[: 5 * member], random_context(rng, 7)))
        own[5 * member] = (prompt[5 * member] + 1) % CONFIG.vocab_size
        asked.append(request(member, own, group=2, member=member))
    engine = make_engine(max_batch_tokens=11)
    finished = run(engine, *asked)
    assert [segment.cached for segment in finished] == [0, 5, 10, 15]
    for one, segment in zip(asked, finished, strict=True):
        assert_like_full_forward(one, segment)
    free_all(engine, asked)


def test_versions_share_nothing():
    prompt = random_context(np.random.default_rng(10), 18)
    asked = [request(i, prompt, group=1, member=i, version=i) for i in range(3)]
    engine = make_engine()
    for one, segment in zip(asked, run(engine, *asked), strict=True):
        assert segment.cached == 0
        assert_like_full_forward(one, segment)


def test_a_trajectory_that_changes_version_starts_from_nothing():
    context = random_context(np.random.default_rng(12), 18)
    engine = make_engine()
    run(engine, request(0, context, group=1))
    asked = request(1, context, group=1, version=2)
    (segment,) = run(engine, asked)
    assert segment.cached == 0
    assert_like_full_forward(asked, segment)


def test_a_stop_id_ends_the_segment_and_is_part_of_it():
    rng = np.random.default_rng(19)
    asked = [request(i, random_context(rng, 8), 30) for i in range(12)]
    free_running = run(make_engine(), *asked)
    stop_ids = (3, 17, 44)
    finished = run(make_engine(stop_ids=stop_ids), *asked)
    assert {segment.stopped for segment in finished} == {True, False} or all(segment.stopped for segment in finished)
    for free, segment in zip(free_running, finished, strict=True):
        expected = free.tokens.tolist()
        ends = [i for i, token in enumerate(expected) if token in stop_ids]
        assert segment.stopped == bool(ends)
        assert segment.tokens.tolist() == (expected[: ends[0] + 1] if ends else expected)


def test_a_stop_id_outside_the_vocabulary_is_refused():
    with pytest.raises(EngineError, match="Stop id 61"):
        make_engine(stop_ids=(3, 61))


def test_sampling_options_reach_the_tokens():
    asked = request(0, random_context(np.random.default_rng(20), 9), 12)
    options = {"temperature": 0.6, "top_p": 0.8, "top_k": 9}
    (segment,) = run(make_engine(**options), asked)
    assert_like_full_forward(asked, segment, **options)


def test_bfloat16_stays_near_float32():
    flat = torch.cat([tensor.reshape(-1) for tensor in WEIGHTS[0].named.values()]).bfloat16()
    engine = Engine(CONFIG, seed=SEED, kv_tokens=500, max_batch_tokens=16, dtype=torch.bfloat16)
    engine.set_weights(0, bind_weights(flat, CONFIG))
    rng = np.random.default_rng(21)
    asked = [request(i, random_context(rng, n), 8) for i, n in enumerate([1, 12, 40])]
    for one, segment in zip(asked, run(engine, *asked), strict=True):
        whole = np.concatenate((one.tokens, segment.tokens))
        reference = full_forward(0, whole)[len(one.tokens) - 1 : -1].log_softmax(-1)
        expected = reference.gather(1, torch.from_numpy(segment.tokens.astype(np.int64)).unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(segment.logprobs, expected.numpy(), atol=0.2, rtol=0)
