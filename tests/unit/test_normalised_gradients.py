"""From trajectories to the gradient: every normalisation against float64 arithmetic on the trajectories themselves.

The reference knows no rows, weights or micro-batches: it walks over groups, members, conditioning runs and tokens, and
averages as the definition says. Trajectories have several runs, tool results, masks, dropped members and short groups.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_decoder import reference_logits
from test_model import LLAMA
from test_packing import make_rows

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import make_batch
from pipeline.batches.rows import Rows
from pipeline.config import Truncation
from pipeline.losses import NORMALIZATIONS
from pipeline.trajectory import Group, Span, Trajectory
from workers.learning.packing import TrainingRows, micro_batches
from workers.learning.training import Trainee
from workers.model import bind_weights, init_flat

CONFIG = replace(LLAMA, vocab_size=13)
TEMPERATURE = 0.8
TRUNCATION = Truncation(train="zero_reward", by_cause={"context": "drop", "turns": "drop_and_exclude_from_baseline"})


def make_groups(seed: int) -> list[Group]:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(low, high))]

    groups = []
    for index, size in enumerate((4, 1, 3)):
        group = Group(index, index, 0)
        for member in range(size):
            spans = []
            for run in range(rng.randint(1, 3)):
                spans.append(Span("prompt", ids(1, 4), run=run))
                for _ in range(rng.randint(0, 2)):
                    made = ids(1, 5)
                    spans.append(Span("generated", made, 0, 0, [rng.uniform(-4, -1) for _ in made], run))
                    spans.append(Span("framing", ids(0, 2), run=run))
            trajectory = Trajectory(index, member, index, spans, reward=rng.random())
            trajectory.truncated = rng.choice([None, None, "context", "turns", "generated_tokens"])
            trajectory.loss_mask_end = rng.choice([None, None, 3])
            group.trajectories.append(trajectory)
        groups.append(group)
    return groups


def advantages_of(groups, estimator, min_members):
    """Plain, by the definition: what the truncation policies make of rewards, then centred."""
    kept = {None: "reward", "context": "reward", "turns": None, "generated_tokens": "zero"}
    rewards = [
        [{"reward": t.reward, "zero": 0.0, None: None}[kept[t.truncated]] for t in group.trajectories]
        for group in groups
    ]
    return estimator.compute(rewards, min_members)


def trained_tokens(trajectory):
    """[(run's ids so far, token, behaviour log-prob)] of the tokens that are trained, in order."""
    if trajectory.truncated in ("context", "turns"):
        return []
    found, contexts, offset = [], {}, 0
    for span in trajectory.spans:
        context = contexts.setdefault(span.run, [])
        for place, token in enumerate(span.tokens):
            if span.kind == "generated":
                if trajectory.loss_mask_end is None or offset < trajectory.loss_mask_end:
                    found.append((list(context), token, span.logprobs[place]))
                offset += 1
            context.append(token)
    return found


def reference_gradient(trainee, groups, advantages, normalize, token_loss):
    """The gradient of the loss as its definition reads, float64 [num_elements]; token_loss(scores, token, q, A)."""
    named = bind_weights(trainee.flat.detach().double().clone(), trainee.config).named
    for tensor in named.values():
        tensor.requires_grad_(True)
    sums = []  # (group, number of trained tokens, sum of token losses) per active trajectory
    for group, values in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            losses = []
            for context, token, q in trained_tokens(trajectory):
                scores = reference_logits(named, trainee.config, context)[-1] / TEMPERATURE
                losses.append(token_loss(scores, token, q, advantage))
            if losses:
                sums.append((group.group, len(losses), torch.stack(losses).sum()))
    num_tokens, num_active = sum(n for _, n, _ in sums), len(sums)
    per_group = {g: sum(n for other, n, _ in sums if other == g) for g, _, _ in sums}
    divisors = {
        "token": lambda g, n: num_tokens,
        "sequence": lambda g, n: n * num_active,
        "batch": lambda g, n: num_active,
        "sum": lambda g, n: 1,
        "prompt": lambda g, n: per_group[g] * len(per_group),
    }
    sum(loss / divisors[normalize](g, n) for g, n, loss in sums).backward()
    return torch.cat([tensor.grad.flatten() for tensor in named.values()])


def cispo(scores, token, q, advantage):
    logp = torch.log_softmax(scores, dim=-1)[token]
    return -advantage * (logp - q).exp().clamp(max=6.0).detach() * logp


def ppo_with_terms(scores, token, q, advantage):
    """PPO, an entropy bonus of 0.3, and half the squared log-prob as a term of its own in a user's loss."""
    logps = torch.log_softmax(scores, dim=-1)
    ratio = (logps[token] - q).exp()
    surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return surrogate + 0.5 * logps[token] ** 2 + 0.3 * (logps.exp() * logps).sum()


def users_ppo(logprobs, behaviour_logprobs, advantages, mask, ages):
    ratios = torch.exp(logprobs - behaviour_logprobs)
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages) + 0.5 * logprobs**2


LOSSES = {
    "cispo": (cispo, {"loss": {"name": "CISPO"}}),
    "ppo_with_terms": (
        ppo_with_terms,
        {"loss": {"name": "CustomLoss", "path": f"{__name__}:users_ppo"}, "entropy_coefficient": 0.3},
    ),
}


def make_trainee(**options) -> Trainee:
    initial = init_flat(CONFIG, seed=1)
    trainee = Trainee(CONFIG, initial, optimizer={}, temperature=TEMPERATURE, **options)
    noise = torch.Generator().manual_seed(5)
    trainee.flat += 0.2 * torch.randn(trainee.flat.shape, generator=noise)
    return trainee


def training_rows(rows: Rows) -> TrainingRows:
    names = ("lengths", "tokens", "weights", "scales", "behaviour_logprobs", "versions")
    return TrainingRows(**dict(zip(names, rows.payload(), strict=True)))


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [GroupCentered(), Batchwise(standardize=True)], ids=str)
def test_gradient_is_that_of_the_definition_for_every_split(normalize, loss, advantage):
    token_loss, options = LOSSES[loss]
    groups = make_groups(seed=2)
    trainees = [make_trainee(micro_batch_tokens=tokens, **options) for tokens in (1000, 20, 1)]
    rules = BatchRules(advantage=advantage, normalize=normalize, truncation=TRUNCATION, train_all=loss != "cispo")
    batch = make_batch(groups, 0, rules)
    expected = reference_gradient(
        trainees[0], groups, advantages_of(groups, advantage, min_members=2), normalize, token_loss
    )
    gradients = []
    for trainee in trainees:
        trainee.forward_backward(training_rows(batch.rows), 0, zero_gradients=True)
        gradients.append(trainee.flat_grad)
    assert relative_distance(gradients[0], expected) < 3e-6
    for gradient in gradients[1:]:  # as far as float32 goes: some CPUs' kernels come to 1.07e-6
        assert relative_distance(gradient, gradients[0]) < 2e-6


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_groups_trained_one_after_another_make_the_gradient_of_the_whole_batch(normalize, loss):
    """Deferred normalisation: each chunk knows its own divisors only, and gradient_scale has the batch's.

    Computed in float64, so that nothing but the normalisation can differ.
    """
    _, options = LOSSES[loss]
    groups = make_groups(seed=3)
    fields = {"normalize": normalize, "truncation": TRUNCATION, "min_members": 1}
    rules = BatchRules(advantage=GroupCentered(), train_all=loss != "cispo", **fields)
    streamed = replace(rules, streamed=True)
    whole, chunked = (make_trainee(**options, dtype=torch.float64) for _ in range(2))
    for trainee in (whole, chunked):
        trainee.round_weights()
    whole.forward_backward(training_rows(make_batch(groups, 0, rules).rows), 0, zero_gradients=True)
    for index, group in enumerate(groups):
        rows = training_rows(make_batch([group], 0, streamed).rows)
        chunked.forward_backward(rows, 0, zero_gradients=index == 0)
    scale = make_batch(groups, 0, streamed).gradient_scale
    assert relative_distance(chunked.flat_grad * scale, whole.flat_grad) < 3e-7  # of float32 rows and sums


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_micro_batches_are_averaged_over_all_tokens_and_not_each_by_its_own(loss):
    """The recorded case: 4 rows of 1, 2, 3 and 10 tokens, as one micro-batch, as two and as four."""
    path = Path(__file__).parent.parent / "data" / "cases" / "HR44" / "case.json"
    case = json.loads(path.read_text(encoding="utf-8"))
    lengths = [len(row) for row in case["per_token_loss"]]
    assert lengths == [1, 2, 3, 10]
    groups = [Group(g, g, 0) for g in range(4)]
    for g, length in enumerate(lengths):
        spans = [Span("prompt", [1]), Span("generated", [2] * length, 0, 0, [-1.0] * length)]
        groups[g].trajectories.append(Trajectory(g, 0, g, spans, reward=float(g % 2)))
    rules = BatchRules(advantage=Batchwise(), normalize=loss, truncation=Truncation(), train_all=True)
    rows = training_rows(make_batch(groups, 0, rules).rows)
    values = np.zeros(len(rows.tokens))
    values[rows.scales != 0] = np.concatenate(case["per_token_loss"])
    expected = case["token_mean" if loss == "token" else "row_mean"]
    num_cuts = set()
    for max_tokens in (1000, 13, 1):
        factor = torch.ones((), dtype=torch.float32, requires_grad=True)
        cut = list(micro_batches(rows, max_tokens, by_scale=True))
        num_cuts.add(len(cut))
        for part in cut:
            products = torch.from_numpy((rows.scales * values).astype(np.float32)[part.sources])
            (factor * products).sum().backward()
        assert factor.grad.item() == pytest.approx(expected, rel=1e-6)
    assert num_cuts == {1, 2, 4}


def test_kl_to_the_first_weights_is_normalised_like_the_loss():
    """Zero with zero gradient at first; then a pull towards the first weights that the reference has, too."""
    config = replace(LLAMA, vocab_size=50)
    rows = make_rows([7, 12, 3, 9], idle_rows=(0, 1, 2, 3))
    initial = init_flat(config, seed=0)
    trainee = Trainee(config, initial, optimizer={}, loss={"name": "PPO"}, kl_coefficient=0.7, temperature=TEMPERATURE)
    first = trainee.flat.detach().double().clone()
    metrics = trainee.forward_backward(rows, 0, zero_gradients=True)
    assert metrics["train/kl"] == 0.0 == metrics["train/loss"] and trainee.flat_grad.abs().max() < 1e-7
    trainee.flat += 0.1 * torch.randn(trainee.flat.shape, generator=torch.Generator().manual_seed(2))
    metrics = trainee.forward_backward(rows, 0, zero_gradients=True)

    named = bind_weights(trainee.flat.detach().double().clone(), config).named
    reference = bind_weights(first, config).named
    for tensor in named.values():
        tensor.requires_grad_(True)
    loss, divergences, start = torch.zeros((), dtype=torch.float64), [], 0
    for length in rows.lengths:
        ids = rows.tokens[start : start + length].tolist()
        logps, others = (
            torch.log_softmax(reference_logits(weights, config, ids) / TEMPERATURE, dim=-1)
            for weights in (named, reference)
        )
        for t in range(length - 1):
            if rows.scales[start + t]:
                log_ratio = others[t, ids[t + 1]] - logps[t, ids[t + 1]]
                divergences.append((log_ratio.exp() - 1 - log_ratio).item())
                loss = loss + 0.7 * float(rows.scales[start + t]) * (log_ratio.exp() - 1 - log_ratio)
        start += length
    loss.backward()
    expected = torch.cat([tensor.grad.flatten() for tensor in named.values()])
    assert metrics["train/kl"] == pytest.approx(np.mean(divergences), rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert relative_distance(trainee.flat_grad, expected) < 1e-5
