"""The engine against its slow twin: one full forward pass per token, without cache, batch or memory limit."""

import numpy as np
import pytest
import torch

from workers import kv_window
from workers.engine import Engine, EngineError, EngineRequest, FinishedSegment
from workers.errors import NonFiniteError
from workers.model import RopeTable, Weights, bind_weights, decode, init_flat, logits
from workers.model_config import ModelConfig
from workers.sampling import sample, uniforms

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=2048,
    qk_norm=True,
)
SEED = 11


def make_weights(version: int) -> Weights:
    """Five times the usual deviation: attention then matters, and tokens are far from each other in probability."""
    flat = init_flat(CONFIG, seed=100 + version)
    for tensor in bind_weights(flat, CONFIG).named.values():
        if tensor.dim() == 2:
            tensor.mul_(5.0)
    return bind_weights(flat, CONFIG)


WEIGHTS = [make_weights(version) for version in range(3)]
ROPE = RopeTable(CONFIG)


@torch.inference_mode()
def full_forward(version: int, tokens: np.ndarray) -> torch.Tensor:
    """Logits [T, V] of one sequence, all tokens at once."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(CONFIG.num_heads // CONFIG.num_kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / CONFIG.head_dim**0.5
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)

    ids = torch.from_numpy(tokens.astype(np.int64))
    hidden = decode(WEIGHTS[version], CONFIG, ROPE, ids, torch.arange(len(ids)), attend)
    return logits(WEIGHTS[version], hidden)


def make_engine(**options) -> Engine:
    engine = Engine(CONFIG, seed=SEED, **{"kv_tokens": 2000, "max_batch_tokens": 512, **options})
    engine._store.pool[1:] = float("nan")  # to read a row before it is written would show
    for version, weights in enumerate(WEIGHTS):
        engine.set_weights(version, weights)
    return engine


def request(
    number: int,
    context,
    max_tokens: int = 6,
    *,
    group: int | None = None,
    member: int = 0,
    version: int = 0,
    generated: int = 0,
) -> EngineRequest:
    tokens = np.asarray(context, dtype=np.int32)
    return EngineRequest(number, number if group is None else group, member, version, tokens, max_tokens, generated)


def run(engine: Engine, *requests: EngineRequest) -> list[FinishedSegment]:
    """Add all, step to the end; the segments in the order of the requests."""
    for one in requests:
        engine.add(one)
    return drain(engine, len(requests))


def drain(engine: Engine, expected: int) -> list[FinishedSegment]:
    finished: list[FinishedSegment] = []
    for _ in range(10_000):
        if not engine.has_work:
            break
        finished += engine.step()
    assert not engine.has_work, "the engine never ends"
    assert len(finished) == expected
    return sorted(finished, key=lambda segment: segment.request)


def assert_like_full_forward(asked: EngineRequest, segment: FinishedSegment, **sampling) -> None:
    """The same tokens as drawn one by one from full forward passes, and log-probs to 1e-5."""
    assert (segment.request, segment.version) == (asked.request, asked.version)
    assert segment.tokens.dtype == np.int32 and segment.logprobs.dtype == np.float32
    whole = np.concatenate((asked.tokens, segment.tokens))
    begin, num = len(asked.tokens), len(segment.tokens)
    positions = asked.generated + np.arange(num)
    noise = uniforms(SEED, np.full(num, asked.group), np.full(num, asked.member), positions)
    expected, logprobs = sample(full_forward(asked.version, whole)[begin - 1 : -1], torch.from_numpy(noise), **sampling)
    assert segment.tokens.tolist() == expected.tolist()
    np.testing.assert_allclose(segment.logprobs, logprobs.numpy(), atol=1e-5, rtol=0)


def random_context(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, CONFIG.vocab_size, length).astype(np.int32)


def free_all(engine: Engine, asked: list[EngineRequest], kv_tokens: int = 2000) -> None:
    for one in asked:
        engine.release(one.group, one.member)
    assert engine.kv_tokens_free == kv_tokens
    assert not engine._cache.pool.references.any()


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


def test_running_requests_are_taken_back_and_computed_again_when_memory_ends():
    rng = np.random.default_rng(13)
    asked = [request(i, random_context(rng, 10), 25, version=i % 2) for i in range(8)]
    engine = make_engine(kv_tokens=70, max_batch_tokens=16)
    engine._store.pool[1:] = float("nan")
    finished = run(engine, *asked)
    assert engine.num_taken_back > 0
    for one, segment in zip(asked, finished, strict=True):
        assert_like_full_forward(one, segment)
    free_all(engine, asked, kv_tokens=70)


def test_a_group_under_memory_pressure_equals_full_forward():
    rng = np.random.default_rng(14)
    prompts = [random_context(rng, 14) for _ in range(3)]
    asked = [request(i, prompts[i // 4], 18, group=i // 4, member=i % 4) for i in range(12)]
    engine = make_engine(kv_tokens=64, max_batch_tokens=10)
    for one, segment in zip(asked, run(engine, *asked), strict=True):
        assert_like_full_forward(one, segment)
    assert engine.num_taken_back > 0
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
    assert not engine.has_work and engine.kv_tokens_free == 2000


def test_a_trajectory_has_one_request_at_a_time():
    engine = make_engine()
    engine.add(request(0, [1, 2], group=5))
    with pytest.raises(EngineError, match="one request at a time"):
        engine.add(request(1, [1, 2], group=5))
    drain(engine, 1)


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


def test_a_version_in_use_can_not_be_dropped():
    engine = make_engine()
    engine.add(request(0, [1, 2, 3], version=1))
    for _ in range(2):  # waiting, then running
        with pytest.raises(EngineError, match="1 requests still need it"):
            engine.drop_version(1)
        engine.step()
    drain(engine, 1)
    engine.drop_version(1)
    assert engine.kv_tokens_free == 2000  # also that of the trajectory, which is still known
    with pytest.raises(EngineError, match="can't be dropped"):
        engine.drop_version(1)
    engine.set_weights(1, WEIGHTS[2])
    asked = request(1, [1, 2, 3], group=0, version=1)
    (segment,) = run(engine, asked)
    assert segment.cached == 0
    assert_like_full_forward(EngineRequest(1, 0, 0, 2, asked.tokens, 6, 0), FinishedSegment(1, 2, *_tail(segment)))


def _tail(segment: FinishedSegment) -> tuple:
    return (segment.tokens, segment.logprobs, segment.cached, segment.stopped, segment.seconds, segment.queue_seconds)


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
