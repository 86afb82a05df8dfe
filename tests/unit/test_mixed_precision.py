"""bfloat16 computation over float32 master weights: what is rounded, and what must not be."""

import pytest
import torch
from test_packing import make_rows
from test_training import LENGTHS, make_trainee

from shm.block import Block
from shm.cpu_weights import CpuWeightSlots
from workers.learning.training import Trainee
from workers.model import bind_weights
from workers.model_config import layout


def make_rounded(**options) -> Trainee:
    trainee = make_trainee(dtype=torch.bfloat16, **options)
    trainee.round_weights()  # make_trainee has moved the master weights
    return trainee


def test_updates_too_small_for_bfloat16_add_up_in_the_master_weights():
    """A weight of 1 can't take a step of 1e-4 in bfloat16 (its neighbours are 0.4 % away); 100 of them it can."""
    trainee = make_rounded()
    rows = make_rows(LENGTHS)
    start = trainee.flat.clone()
    moved = []
    for _ in range(100):
        trainee.forward_backward(rows, 0, zero_gradients=True)
        rounded = trainee.weights.final_norm.detach().clone()
        trainee.optimizer_step(lr=1e-4)
        moved.append(not torch.equal(trainee.weights.final_norm.detach(), rounded))
    big = start.abs() > 0.5
    per_step = 1e-4
    assert big.sum() > 20 and per_step < (start[big].abs() * 2**-9).min()  # less than half a bfloat16 step, each
    total = (trainee.flat - start)[big].abs()
    assert total.max() > 30 * per_step
    assert any(moved)  # and in time the copy that is computed with follows
    assert trainee.flat.dtype == trainee.flat_grad.dtype == torch.float32
    states = list(trainee._optimizer.state().values())
    assert len(states) == 3 and all(value.dtype == torch.float32 for value in states)


def test_samplers_slot_and_learner_hold_the_same_rounded_weights():
    trainee = make_rounded()
    trainee.forward_backward(make_rows(LENGTHS), 0, zero_gradients=True)
    trainee.optimizer_step(lr=1e-2)
    block = Block.create("slot", layout(trainee.config).num_bytes("bfloat16"))
    slots = CpuWeightSlots([block], trainee.flat.numel(), torch.bfloat16)
    try:
        assert slots.publish(0, trainee.flat) == 2 * trainee.flat.numel()
        published = bind_weights(slots.flat(0), trainee.config).named
        for name, tensor in trainee.weights.named.items():
            assert tensor.dtype == torch.bfloat16 and torch.equal(published[name], tensor), name
    finally:
        del published
        slots.close()


@pytest.mark.parametrize("micro_batch_tokens", [1000, 1])
def test_gradient_is_near_the_float32_one_and_is_summed_in_float32(micro_batch_tokens):
    exact, rounded = make_trainee(), make_rounded(micro_batch_tokens=micro_batch_tokens)
    rows = make_rows(LENGTHS)
    exact.forward_backward(rows, 0, zero_gradients=True)
    rounded.forward_backward(rows, 0, zero_gradients=True)
    distance = (rounded.flat_grad - exact.flat_grad).norm() / exact.flat_grad.norm()
    assert 1e-4 < distance < 0.1  # some bits of bfloat16, and no more
    if micro_batch_tokens == 1:  # sums of several rows have more bits than bfloat16
        assert not torch.equal(rounded.flat_grad.bfloat16().float(), rounded.flat_grad)


def test_gradients_accumulate_and_a_step_uses_them_up():
    trainee = make_rounded()
    rows = make_rows(LENGTHS)
    trainee.forward_backward(rows, 0, zero_gradients=True)
    once = trainee.flat_grad.clone()
    trainee.forward_backward(rows, 0, zero_gradients=False)
    assert torch.equal(trainee.flat_grad, 2 * once)
    trainee.optimizer_step(lr=0.0)
    trainee.forward_backward(rows, 0, zero_gradients=False)
    assert torch.equal(trainee.flat_grad, once)
