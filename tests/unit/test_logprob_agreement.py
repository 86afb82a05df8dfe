"""Sampler and learner score a token alike: under which distribution, at which index, and which tokens have a number."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import pipeline as rl
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import make_batch
from pipeline.tasks import guess
from pipeline.trajectory import Group, Span, Trajectory
from pipeline.user_warnings import ConfigWarning
from tests.engine_twin import CONFIG, SEED, make_engine, request, run
from workers.generation.sampling import sample
from workers.learning.packing import TrainingRows, micro_batches
from workers.learning.training import Trainee
from workers.model import init_flat
from workers.policy_losses.loss_terms import token_logprobs

CASES = Path(__file__).parent.parent / "data" / "cases"
HR24 = json.loads((CASES / "HR24" / "logits.json").read_text(encoding="utf-8"))
HR48 = json.loads((CASES / "HR48" / "case.json").read_text(encoding="utf-8"))
UNIFORMS = torch.linspace(0, 1 - 1e-9, 4001, dtype=torch.float64)


def drawn(**options) -> dict[int, float]:
    """{token: its recorded log-prob} of every token that any uniform draws from the case's logits."""
    logits = torch.tensor(HR24["logits"]).expand(len(UNIFORMS), -1)
    tokens, logprobs = sample(logits, UNIFORMS, **options)
    return dict(zip(tokens.tolist(), logprobs.tolist(), strict=True))


@pytest.mark.parametrize(("temperature", "key"), [(1.0, "log_softmax_T1"), (0.6, "log_softmax_T0.6")])
def test_sampler_and_learner_score_under_the_sampling_temperature(temperature, key):
    found = drawn(temperature=temperature)
    assert [found[token] for token in range(6)] == pytest.approx(HR24[key], abs=1e-5)
    logits = torch.tensor(HR24["logits"]).expand(6, -1)
    assert token_logprobs(logits, torch.arange(6), temperature).tolist() == pytest.approx(HR24[key], abs=1e-5)


def test_top_p_narrows_what_is_drawn_and_not_what_is_recorded():
    """One stated distribution on both sides: the full one at the sampling temperature."""
    found = drawn(temperature=0.6, top_p=0.9)
    assert sorted(found) == HR24["top_p_0.9_at_T0.6"]["kept_ids"]
    assert [found[token] for token in sorted(found)] == pytest.approx(HR24["log_softmax_T0.6"][:2], abs=1e-5)
    assert sorted(drawn(temperature=0.6, top_k=3)) == [0, 1, 2]


def test_temperature_0_takes_the_likeliest_token_with_log_prob_0():
    assert drawn(temperature=0.0) == {0: 0.0}


def trainer(**options):
    model = rl.Supervisor(device="cpu")
    return rl.AsyncTrainer(
        engine=rl.RolloutEngine(model, env=guess.Guess, **options),
        optimizer=rl.Adam(lr=1e-3),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        groups_per_step=2,
    )


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 3}])
def test_training_on_narrowed_samples_is_warned_of_with_its_reason(options):
    with pytest.warns(ConfigWarning, match="log-probs are those of the full distribution") as caught:
        trainer(**options)
    assert len(caught) == 1


def test_training_at_temperature_0_is_refused_and_full_sampling_is_not_warned_of():
    with pytest.raises(rl.ConfigError, match="temperature is 0, but training needs log-probs"):
        trainer(temperature=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(top_p=1.0, top_k=0)


def rows_of(trajectory: Trajectory) -> TrainingRows:
    other = Trajectory(0, 1, 0, list(trajectory.spans), reward=0.0)
    rules = BatchRules(advantage=rl.GroupCentered(), normalize="sum", truncation=rl.Truncation())
    rows = make_batch([Group(0, 0, 0, [trajectory, other])], 0, rules).rows
    names = ("lengths", "tokens", "weights", "scales", "behaviour_logprobs", "versions")
    return TrainingRows(**dict(zip(names, rows.payload(), strict=True)))


def test_every_sampled_token_is_scored_from_the_place_before_it_and_no_prompt_token_is():
    length = HR48["prompt_len"]
    ids, logprobs = HR48["ids"], [-0.1, -0.2, -0.3]
    spans = [Span("prompt", ids[:length]), Span("generated", ids[length:], 0, 0, logprobs)]
    rows = rows_of(Trajectory(0, 0, 0, spans, reward=1.0))
    batch = next(micro_batches(rows, max_tokens=1))
    assert batch.predict_index.tolist() == HR48["logit_rows_used"]
    assert (batch.predict_index + 1).tolist() == HR48["scored_token_positions"]
    assert batch.targets.tolist() == ids[length:]
    assert rows.behaviour_logprobs[batch.sources] == pytest.approx(logprobs)
    weighed = np.flatnonzero(rows.weights[: len(ids)]) + 1
    assert [int(place in weighed) for place in range(len(ids))] == HR48["mask"]


seen: list[tuple[torch.Tensor, torch.Tensor]] = []


def look(logprobs, behaviour_logprobs, advantages, mask, ages):
    """A user's loss that keeps what it is given."""
    seen.append((logprobs.detach().clone(), behaviour_logprobs.clone()))
    return -logprobs * advantages


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_learners_number_is_the_samplers_per_index(temperature):
    """Sampled by the engine from the learner's own first weights; every ratio is then 1."""
    record = {"name": "CustomLoss", "path": f"{__name__}:look"}
    trainee = Trainee(CONFIG, init_flat(CONFIG, seed=SEED), optimizer={}, loss=record, temperature=temperature)
    engine = make_engine(temperature=temperature)
    engine.set_weights(7, trainee.weights)
    prompt = np.array(HR48["ids"][: HR48["prompt_len"]], dtype=np.int32)
    with torch.inference_mode():
        (segment,) = run(engine, request(0, prompt, 3, version=7))
    spans = [
        Span("prompt", prompt.tolist()),
        Span("generated", segment.tokens.tolist(), 0, 0, segment.logprobs.tolist()),
    ]
    seen.clear()
    metrics = trainee.forward_backward(rows_of(Trajectory(0, 0, 0, spans, reward=1.0)), 0, zero_gradients=True)
    ((learner, sampler),) = seen
    assert len(learner) == 2 * 3  # two members of three sampled tokens
    assert sampler.tolist() == pytest.approx(2 * segment.logprobs.tolist())
    assert learner.tolist() == pytest.approx(sampler.tolist(), abs=1e-5)
    assert metrics["importance/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/max_abs_logprob"] < 1e-5
