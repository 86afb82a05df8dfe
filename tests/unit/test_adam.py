"""The optimizer takes the steps of torch.optim.AdamW, bit for bit, and no compiler is loaded for it."""

import subprocess
import sys

import pytest
import torch

from workers.learning.adam import Adam


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_are_those_of_torch(weight_decay):
    torch.manual_seed(0)
    weights = torch.randn(1000)
    gradients = torch.zeros(1000)
    adam = Adam(weights, gradients, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=weight_decay, num_decayed=600)
    parts = [weights[:600].clone(), weights[600:].clone()]
    groups = [{"params": [parts[0]], "weight_decay": weight_decay}, {"params": [parts[1]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.9), eps=1e-6, fused=True)
    for step in range(1, 6):
        gradients.copy_(torch.randn(1000))
        parts[0].grad, parts[1].grad = gradients[:600].clone(), gradients[600:].clone()
        for group in reference.param_groups:
            group["lr"] = 0.01 / step
        adam.step(lr=0.01 / step)
        reference.step()
        assert torch.equal(weights, torch.cat(parts))
    assert adam.num_steps == 5


def test_making_one_loads_no_compiler():
    """It would be a large part of a learner's start."""
    code = (
        "import sys, torch, workers.model, workers.learning.training\n"
        "from workers.model_config import TINY\n"
        "flat = workers.model.init_flat(TINY, seed=0)\n"
        "workers.learning.training.Trainee(TINY, flat, optimizer={}, loss={'name': 'CISPO'})\n"
        "assert 'torch._dynamo' not in sys.modules and 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
