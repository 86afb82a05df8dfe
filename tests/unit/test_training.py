"""The learner's step against slow float64 arithmetic; and that a bad number never reaches a parameter."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_decoder import reference_logits
from test_model import FAMILIES, LLAMA
from test_packing import make_rows

from workers.errors import NonFiniteError
from workers.learning.packing import RowsError
from workers.learning.training import Trainee, TrainingError
from workers.model import bind_weights, init_flat
from workers.model_config import layout

CISPO = {"name": "CISPO", "eps_max": 1.5}
LENGTHS = [7, 12, 3, 9, 9, 5]


def make_trainee(config=LLAMA, seed=0, device="cpu", **options):
    config = replace(config, vocab_size=50)
    values = {"optimizer": {}, "loss": CISPO, "micro_batch_tokens": 1000} | options
    trainee = Trainee(config, init_flat(config, seed=seed).to(device), **values)
    noise = torch.Generator().manual_seed(11)  # away from the symmetric start: biases, norms and attention all matter
    trainee.flat += 0.2 * torch.randn(trainee.flat.shape, generator=noise).to(trainee.flat.device)
    return trainee


def rows_with_realistic_logprobs(trainee, **options):
    """Behaviour log-probs around the model's own, so that some ratios reach the cap of 1.5 and some don't."""
    rows = make_rows(LENGTHS, **options)
    rng = np.random.default_rng(5)
    found, _ = reference_results(trainee, rows, trainee._temperature)
    for index, (logprob, _) in found.items():
        rows.behaviour_logprobs[index] = logprob + rng.normal(scale=0.5)
    return rows


def reference_results(trainee, rows, temperature, eps_max=1.5):
    """{index: (log p, capped ratio)} and the gradient [num_elements], all in float64, row by row and token by token."""
    flat = trainee.flat.detach().double().clone()
    named = bind_weights(flat, trainee.config).named
    for tensor in named.values():
        tensor.requires_grad_(True)
    found, loss, start = {}, torch.zeros((), dtype=torch.float64), 0
    for length in rows.lengths:
        scores = reference_logits(named, trainee.config, rows.tokens[start : start + length].tolist()) / temperature
        for t in range(length - 1):
            index = start + t
            if rows.versions[index] < 0:
                continue
            logprob = scores[t, rows.tokens[index + 1]] - torch.logsumexp(scores[t], dim=0)
            capped = min(math.exp(logprob.item() - rows.behaviour_logprobs[index]), eps_max)
            found[index] = (logprob.item(), capped)
            loss = loss - float(rows.weights[index]) * capped * logprob
        start += length
    loss.backward()
    return found, torch.cat([tensor.grad.flatten() for tensor in named.values()])


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_loss_gradient_and_metrics_are_the_references(config):
    trainee = make_trainee(config, temperature=0.8)
    rows = rows_with_realistic_logprobs(trainee, idle_rows=(2, 4))
    began = time.perf_counter()
    metrics = trainee.forward_backward(rows, version=2, zero_gradients=True)
    elapsed = time.perf_counter() - began
    found, gradient = reference_results(trainee, rows, temperature=0.8)
    torch.testing.assert_close(trainee.flat_grad.double(), gradient, rtol=1e-4, atol=2e-5 * gradient.abs().max().item())

    logprobs = {index: logprob for index, (logprob, _) in found.items()}
    ratios = {index: math.exp(logprobs[index] - rows.behaviour_logprobs[index]) for index in found}
    loss = sum(-float(rows.weights[index]) * capped * logprob for index, (logprob, capped) in found.items())
    current = [index for index in found if rows.versions[index] == 2]
    kl = np.mean([ratios[index] - 1 - math.log(ratios[index]) for index in current])
    gap = max(abs(math.log(ratios[index])) for index in current)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["importance/ratio_mean"] == pytest.approx(np.mean(list(ratios.values())), rel=1e-4)
    assert metrics["importance/ratio_max"] == pytest.approx(max(ratios.values()), rel=1e-4)
    share = np.mean([ratio >= 1.5 for ratio in ratios.values()])
    assert 0 < share < 1
    assert metrics["importance/clip_frac"] == pytest.approx(share)
    assert metrics["mismatch/kl"] == pytest.approx(kl, rel=1e-3)
    assert metrics["mismatch/max_abs_logprob"] == pytest.approx(gap, rel=1e-4)
    assert metrics["train/forward_seconds"] > 0 and metrics["train/backward_seconds"] > 0
    assert metrics["train/forward_seconds"] + metrics["train/backward_seconds"] < elapsed


def test_metrics_of_the_other_losses_are_means_over_the_right_tokens():
    """DecoupledPPO's capped ratio counts tokens with an advantage, entropy trained ones; PolicyGradient has none."""
    terms = {"entropy_coefficient": 0.1, "kl_coefficient": 0.1}
    trainee = make_trainee(loss={"name": "DecoupledPPO", "max_importance_weight": 1.2}, **terms)
    rows = rows_with_realistic_logprobs(trainee, idle_rows=(2, 4))
    masked = np.flatnonzero(rows.scales)[::5]
    rows.scales[masked] = rows.weights[masked] = 0
    metrics = trainee.forward_backward(rows, version=2, zero_gradients=True)
    found, _ = reference_results(trainee, rows, temperature=1.0)
    ratios = {index: math.exp(logprob - rows.behaviour_logprobs[index]) for index, (logprob, _) in found.items()}
    weighed = [ratio for index, ratio in ratios.items() if rows.weights[index] != 0]
    assert 0 < len(weighed) < len(ratios)
    assert metrics["importance/capped_mean"] == pytest.approx(np.mean(np.minimum(weighed, 1.2)), rel=1e-4)
    assert metrics["importance/capped_frac"] == pytest.approx(np.mean(np.array(weighed) >= 1.2))
    assert metrics["importance/clip_frac"] == pytest.approx(np.mean(np.array(list(ratios.values())) >= 1.2))
    assert metrics["importance/ratio_mean"] == pytest.approx(np.mean(list(ratios.values())), rel=1e-4)

    entropies, start = [], 0
    named = bind_weights(trainee.flat.detach().double(), trainee.config).named
    for length in rows.lengths:
        scores = reference_logits(named, trainee.config, rows.tokens[start : start + length].tolist())
        logps = torch.log_softmax(scores, dim=-1)
        own = -(logps.exp() * logps).sum(dim=-1)
        entropies += [own[t].item() for t in range(length) if rows.scales[start + t] != 0]
        start += length
    assert metrics["train/entropy"] == pytest.approx(np.mean(entropies), rel=1e-4)
    assert metrics["train/kl"] > 0  # the weights have moved away from the first ones

    plain = make_trainee(loss={"name": "PolicyGradient"}).forward_backward(rows, version=2, zero_gradients=True)
    assert not [name for name in plain if name.startswith("importance/")]
    assert plain["mismatch/kl"] == pytest.approx(metrics["mismatch/kl"], rel=1e-4)
    assert "train/kl" not in plain and "train/entropy" not in plain


def test_tokens_count_what_went_through_the_forward_pass():
    rows = make_rows([6, 9, 4], generated_share=1.0, idle_rows=(1,))
    # A row's last token predicts nothing and is not read; a row without weight is measured, so it counts.
    assert make_trainee().forward_backward(rows, 0, True)["train/tokens"] == 5 + 8 + 3


def test_mismatch_is_absent_when_no_token_is_of_age_zero():
    metrics = make_trainee().forward_backward(make_rows(LENGTHS), version=9, zero_gradients=True)
    assert "importance/ratio_mean" in metrics and "mismatch/kl" not in metrics
    assert "importance/ratio_mean" not in make_trainee().forward_backward(make_rows([]), 9, True)


@pytest.mark.parametrize("micro_batch_tokens", [1, 10, 25])
def test_micro_batches_do_not_change_gradient_or_metrics(micro_batch_tokens):
    whole, cut = make_trainee(), make_trainee(micro_batch_tokens=micro_batch_tokens)
    rows = rows_with_realistic_logprobs(whole, idle_rows=(0,))
    expected, found = whole.forward_backward(rows, 1, True), cut.forward_backward(rows, 1, True)
    largest = whole.flat_grad.abs().max().item()
    torch.testing.assert_close(cut.flat_grad, whole.flat_grad, rtol=1e-4, atol=1e-6 * largest)
    for name in expected.keys() - {"train/forward_seconds", "train/backward_seconds"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.5])
def test_there_is_a_beat_before_every_micro_batch_and_in_each_layer_both_ways(kl_coefficient):
    """Rows that don't share a micro-batch: a long batch, or a long pass, is not taken for a hang."""
    trainee, beats = make_trainee(micro_batch_tokens=1, kl_coefficient=kl_coefficient), []
    rows = rows_with_realistic_logprobs(trainee)
    trainee.forward_backward(rows, version=0, zero_gradients=True, beat=lambda: beats.append(1))
    passes = 2 if kl_coefficient == 0.0 else 3  # forward, backward, and that of the reference
    assert len(beats) == len(rows.lengths) * (1 + passes * trainee.config.num_layers) > 1


def test_gradients_accumulate_until_they_are_zeroed():
    trainee = make_trainee()
    rows = make_rows(LENGTHS)
    trainee.forward_backward(rows, 0, zero_gradients=True)
    once = trainee.flat_grad.clone()
    trainee.forward_backward(rows, 0, zero_gradients=False)
    assert torch.equal(trainee.flat_grad, 2 * once)
    trainee.forward_backward(rows, 0, zero_gradients=True)
    assert torch.equal(trainee.flat_grad, once)
    trainee.optimizer_step(lr=0.0)
    trainee.forward_backward(rows, 0, zero_gradients=False)  # the step used the old ones up
    assert torch.equal(trainee.flat_grad, once)


def test_rows_without_weight_have_exactly_zero_gradient():
    trainee = make_trainee()
    rows = make_rows(LENGTHS, idle_rows=range(len(LENGTHS)))
    metrics = trainee.forward_backward(rows, 0, True)
    assert metrics["train/loss"] == 0 and "importance/ratio_mean" in metrics
    assert (trainee.flat_grad == 0).all()

    part, alone = make_trainee(), make_trainee()
    part.forward_backward(make_rows(LENGTHS, idle_rows=(1, 3)), 0, True)
    rows = make_rows(LENGTHS)
    keep = np.repeat(np.isin(np.arange(len(LENGTHS)), (0, 2, 4, 5)), LENGTHS)
    arrays = {
        name: getattr(rows, name)[keep] for name in ("tokens", "weights", "scales", "behaviour_logprobs", "versions")
    }
    alone.forward_backward(replace(rows, lengths=rows.lengths[[0, 2, 4, 5]], **arrays), 0, True)
    assert torch.equal(part.flat_grad, alone.flat_grad)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_parameters_and_gradients_are_views_of_the_flat_buffers(tie_embeddings):
    trainee = make_trainee(replace(LLAMA, tie_embeddings=tie_embeddings))
    for _ in range(2):
        trainee.forward_backward(make_rows(LENGTHS), 0, True)
        trainee.optimizer_step(lr=1e-2)
    for entry in layout(trainee.config).entries:
        parameter = trainee.weights.named[entry.name]
        assert parameter.data_ptr() == trainee.flat.data_ptr() + 4 * entry.offset
        assert parameter.grad.data_ptr() == trainee.flat_grad.data_ptr() + 4 * entry.offset
        assert parameter.is_leaf and not trainee.flat.requires_grad
    assert (trainee.weights.head is trainee.weights.embed) == tie_embeddings


@pytest.mark.parametrize("grad_clip_norm", [None, 0.05])
def test_optimizer_steps_follow_adamw(grad_clip_norm):
    options = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3, "grad_clip_norm": grad_clip_norm}
    trainee = make_trainee(optimizer=options)
    boundary = layout(trainee.config).num_matrix_elements
    values = trainee.flat.double().numpy().copy()
    first, second = np.zeros_like(values), np.zeros_like(values)
    for step in range(1, 6):
        lr, gradient_scale = 0.01 / step, 0.5 + step
        trainee.forward_backward(make_rows(LENGTHS, seed=step), 0, True)
        gradient = trainee.flat_grad.double().numpy() * gradient_scale
        norm = math.sqrt((gradient**2).sum())
        if grad_clip_norm is not None:
            assert norm > grad_clip_norm
            gradient *= grad_clip_norm / norm
        metrics = trainee.optimizer_step(lr=lr, gradient_scale=gradient_scale)
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        values[:boundary] *= 1 - lr * 0.3  # vectors do not decay
        values -= lr * (first / (1 - 0.8**step)) / (np.sqrt(second / (1 - 0.9**step)) + 1e-6)
        np.testing.assert_allclose(trainee.flat.double().numpy(), values, rtol=2e-6, atol=2e-6 * lr * step)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["train/lr"] == lr


def test_a_gradient_below_the_clip_norm_is_not_scaled():
    clipped, free = make_trainee(optimizer={"grad_clip_norm": 1e6}), make_trainee()
    for trainee in (clipped, free):
        trainee.forward_backward(make_rows(LENGTHS), 0, True)
        trainee.optimizer_step(lr=1e-2)
    assert torch.equal(clipped.flat, free.flat)


def test_same_seed_and_calls_give_the_same_bits():
    results = []
    for seed in (3, 3, 4):
        trainee = make_trainee(seed=seed)
        for step in range(3):
            trainee.forward_backward(make_rows(LENGTHS, seed=step), step, True)
            trainee.optimizer_step(lr=1e-2)
        results.append(trainee.flat)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def optimizer_state(trainee):
    return [value.clone() for value in trainee._optimizer.state().values()]


def stepped_trainee():
    """One step taken, so that optimizer state exists."""
    trainee = make_trainee()
    trainee.forward_backward(make_rows(LENGTHS), 0, True)
    trainee.optimizer_step(lr=1e-2)
    return trainee


def assert_untouched(trainee, flat, state):
    assert torch.equal(trainee.flat.view(torch.int32), flat.view(torch.int32))  # bits: a NaN is equal to itself here
    found = optimizer_state(trainee)
    assert len(found) == len(state) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, state, strict=True))


def test_a_nan_weight_raises_at_the_loss_and_changes_nothing():
    trainee = stepped_trainee()
    rows = make_rows([6, 6, 6], generated_share=1.0)
    rows.tokens[:] = 1
    rows.tokens[8] = 33  # in row 1 alone
    with torch.no_grad():
        trainee.weights.embed[33, 0] = math.nan
    # Embeddings are tied: the head spreads the NaN over the log-probs of every row.
    flat, state = trainee.flat.clone(), optimizer_state(trainee)
    with pytest.raises(NonFiniteError, match="loss of batch 12 is nan at row 0, token 0"):
        trainee.forward_backward(rows, 1, True, batch=12)
    assert_untouched(trainee, flat, state)
    with pytest.raises(TrainingError, match="no gradient to step with"):
        trainee.optimizer_step(lr=1e-2)
    assert_untouched(trainee, flat, state)


def test_a_non_finite_loss_names_its_row():
    trainee = make_trainee(replace(LLAMA, tie_embeddings=False))
    rows = make_rows([6, 6, 9], generated_share=1.0)
    rows.tokens[:] = 1
    rows.tokens[8] = 33
    with torch.no_grad():
        trainee.weights.embed[33, 0] = math.nan
    with pytest.raises(NonFiniteError, match="at row 1, "):
        trainee.forward_backward(rows, 1, True)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_gradient_raises_at_the_step_and_changes_nothing(value):
    trainee = stepped_trainee()
    trainee.forward_backward(make_rows(LENGTHS), 1, True)
    trainee.weights.layers[1].down.grad[0, 3] = value
    flat, state = trainee.flat.clone(), optimizer_state(trainee)
    with pytest.raises(NonFiniteError, match="gradient norm of batch 7 is .*layers.1.down"):
        trainee.optimizer_step(lr=1e-2, batch=7)
    assert_untouched(trainee, flat, state)


def test_an_overflow_of_the_scaled_gradient_raises_and_changes_nothing():
    trainee = stepped_trainee()
    trainee.forward_backward(make_rows(LENGTHS), 1, True)
    flat, state = trainee.flat.clone(), optimizer_state(trainee)
    with pytest.raises(NonFiniteError, match="gradient_scale is inf"):
        trainee.optimizer_step(lr=1e-2, gradient_scale=math.inf)
    assert_untouched(trainee, flat, state)


def test_training_goes_on_after_a_refused_gradient():
    trainee, undisturbed = stepped_trainee(), stepped_trainee()
    trainee.forward_backward(make_rows(LENGTHS), 1, True)
    trainee.flat_grad[0] = math.nan
    with pytest.raises(NonFiniteError):
        trainee.optimizer_step(lr=1e-2)
    for one in (trainee, undisturbed):
        one.forward_backward(make_rows(LENGTHS, seed=2), 1, False)
        one.optimizer_step(lr=1e-2)
    assert torch.equal(trainee.flat, undisturbed.flat)


def test_rows_that_do_not_fit_the_model_are_refused():
    with pytest.raises(RowsError, match="65 tokens"):
        make_trainee().forward_backward(make_rows([65]), 0, True)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0"),
        ({"optimizer": {"grad_clip_norm": 0.0}}, "grad_clip_norm is 0.0"),
        ({"optimizer": {"momentum": 0.9}}, "momentum"),
    ],
)
def test_bad_options_are_refused(options, found):
    with pytest.raises(TrainingError, match=found):
        make_trainee(**options)


def test_a_learning_rate_that_is_not_finite_is_refused_before_anything_changes():
    trainee = stepped_trainee()
    trainee.forward_backward(make_rows(LENGTHS), 1, True)
    flat, state = trainee.flat.clone(), optimizer_state(trainee)
    with pytest.raises(TrainingError, match="learning rate is nan"):
        trainee.optimizer_step(lr=math.nan)
    assert_untouched(trainee, flat, state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_gives_the_gradient_step_and_metrics_of_the_cpu():
    host, device = make_trainee(micro_batch_tokens=25), make_trainee(micro_batch_tokens=25, device="cuda")
    rows = rows_with_realistic_logprobs(host, idle_rows=(0,))
    expected, found = host.forward_backward(rows, 1, True), device.forward_backward(rows, 1, True)
    largest = host.flat_grad.abs().max().item()
    torch.testing.assert_close(device.flat_grad.cpu(), host.flat_grad, rtol=1e-3, atol=1e-5 * largest)
    for name in expected.keys() - {"train/forward_seconds", "train/backward_seconds"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert found["train/forward_seconds"] > 0 and found["train/backward_seconds"] > 0
    device.flat_grad.copy_(host.flat_grad)  # AdamW's first step is a sign: compare it from the same gradient
    host.optimizer_step(lr=1e-2)
    device.optimizer_step(lr=1e-2)
    torch.testing.assert_close(device.flat.cpu(), host.flat, rtol=1e-5, atol=1e-6)


def test_ratio_beyond_all_numbers_is_shown_as_the_largest_and_the_metrics_stay_finite():
    """A token that the sampler took for all but impossible: its ratio overflows, CISPO caps it, training goes on."""
    trainee, rows = make_trainee(), make_rows(LENGTHS)
    generated = rows.versions >= 0
    rows.behaviour_logprobs[np.flatnonzero(generated)[0]] = -2000.0
    metrics = trainee.forward_backward(rows, version=int(rows.versions.max()), zero_gradients=True)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["importance/ratio_max"] == pytest.approx(float(np.finfo(np.float32).max))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_begins_at_given_weights_and_measures_kl_to_them(dtype):
    config = replace(LLAMA, vocab_size=50)
    weights = 0.3 * torch.randn(layout(config).num_elements, generator=torch.Generator().manual_seed(3))
    trainee = Trainee(config, weights.clone(), optimizer={}, loss=CISPO, kl_coefficient=0.1, dtype=dtype)
    assert torch.equal(trainee.flat, weights)
    assert torch.equal(trainee.weights.head.float(), bind_weights(weights, config).head.to(dtype).float())
    first = trainee.forward_backward(make_rows(LENGTHS), version=5, zero_gradients=True)
    assert first["train/kl"] == 0.0
    trainee.optimizer_step(lr=0.05)
    assert trainee.forward_backward(make_rows(LENGTHS), version=5, zero_gradients=True)["train/kl"] > 0.0
