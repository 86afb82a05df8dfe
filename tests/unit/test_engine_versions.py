"""Segments over KV that several versions computed: each is proved by recomputation from the versions it names."""

import numpy as np
import pytest
from reference_decoder import reference_logits

from tests.engine_twin import CONFIG, drain, free_all, random_context, request, run
from tests.mixed_twin import VERSIONS, Recomputed, logits_over, make_versions_engine
from workers.generation.engine_requests import EngineError


def test_the_mixed_twin_equals_a_float64_decoder():
    """Which shares no code with ours; one version throughout, then two."""
    tokens = random_context(np.random.default_rng(0), 12)
    named = [{name: tensor.double() for name, tensor in VERSIONS[version].named.items()} for version in (2, 5)]
    for versions in ([2] * 12, [2] * 7 + [5] * 5):
        expected = reference_logits([named[version == 5] for version in versions], CONFIG, tokens.tolist())
        np.testing.assert_allclose(logits_over(versions, tokens).numpy(), expected.numpy(), atol=1e-4, rtol=0)


def test_a_newer_version_goes_on_over_the_kv_of_an_older_one():
    engine, proof = make_versions_engine(), Recomputed()
    context, generated, computed, anchors = random_context(np.random.default_rng(1), 9), 0, 0, []
    for number, version in enumerate((1, 1, 2, 3, 3, 4)):
        asked = request(number, context, 4, group=5, version=version, generated=generated, kv_max_age=2)
        (segment,) = run(engine, asked)
        proof.prove(asked, segment)
        assert segment.cached == (0 if number == 5 else computed)
        anchors.append(segment.kv_version)
        computed = len(context) + 3  # all but the last token
        more = [7, 8] if number % 2 else []  # a new turn, or the same one
        context = np.concatenate((context, segment.tokens, np.array(more, dtype=np.int32)))
        generated += 4
    assert anchors == [1, 1, 1, 1, 1, 4]


def test_kv_that_is_too_old_is_computed_anew_as_if_there_had_been_none():
    engine, proof = make_versions_engine(), Recomputed()
    context = random_context(np.random.default_rng(2), 20)
    first = request(0, context, 5, version=1)
    (segment,) = run(engine, first)
    proof.prove(first, segment)
    asked = request(1, [*context, *segment.tokens, 3], 5, group=0, version=4, generated=5, kv_max_age=2)
    (segment,) = run(engine, asked)
    proof.prove(asked, segment)
    assert (segment.cached, segment.kv_version) == (0, 4)


def test_a_request_over_mixed_kv_that_is_taken_back_is_sampled_over_one_kv_only():
    """It had sampled tokens over KV of versions 1 and 2; what it delivers is over KV of version 2 alone."""
    engine, proof = make_versions_engine(kv_tokens=64), Recomputed()
    rng = np.random.default_rng(3)
    context = random_context(rng, 10)
    first = request(0, context, 4, version=1)
    (segment,) = run(engine, first)
    proof.prove(first, segment)
    older = request(1, random_context(rng, 8), 40, group=1, version=2)
    engine.add(older)
    engine.step()
    younger = request(2, [*context, *segment.tokens], 30, group=0, version=2, generated=4, kv_max_age=1)
    engine.add(younger)
    for _ in range(5):
        engine.step()
    seat = engine._cache.seat_of(0, 0)
    assert engine._cache.anchor[seat] == 1 and engine._cache.length[seat] > 14
    segments = drain(engine, 2)
    assert segments[0].evictions == segments[0].dropped == 0  # the older of the two
    assert segments[1].evictions >= 1 and 1 <= segments[1].dropped
    Recomputed().prove(older, segments[0])
    proof.prove(younger, segments[1])
    assert (segments[1].kv_version, segments[1].cached) == (2, 0)
    free_all(engine, [older, younger], kv_tokens=64)


def test_dropping_a_version_keeps_the_kv_that_it_computed():
    engine, proof = make_versions_engine(), Recomputed()
    first = request(0, [1, 2, 3], 4, version=1)
    (segment,) = run(engine, first)
    proof.prove(first, segment)
    engine.drop_version(1)
    asked = request(1, [1, 2, 3, *segment.tokens], 4, group=0, version=2, generated=4, kv_max_age=1)
    (segment,) = run(engine, asked)
    assert (segment.cached, segment.kv_version) == (6, 1)
    proof.prove(asked, segment)
    free_all(engine, [asked])


def test_a_negative_kv_age_is_refused():
    with pytest.raises(EngineError, match="has kv_max_age -1; 0 allows KV of its own version only"):
        make_versions_engine().add(request(0, [1], kv_max_age=-1))


def test_a_segment_named_by_another_version_would_be_caught():
    """The proof can fail: the same segment under a wrong name for itself, or for its KV."""
    engine, proof = make_versions_engine(), Recomputed()
    first = request(0, [1, 2, 3, 4], 4, version=1)
    (segment,) = run(engine, first)
    proof.prove(first, segment)
    asked = request(1, [1, 2, 3, 4, *segment.tokens], 4, group=0, version=2, generated=4, kv_max_age=1)
    (segment,) = run(engine, asked)
    segment.kv_version = 2
    with pytest.raises(AssertionError):
        proof.prove(asked, segment)
