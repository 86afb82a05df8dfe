"""Losses as a user would write them, in a module of their own that the learner imports."""

import torch


def clipped(logprobs, behaviour_logprobs, advantages, mask, ages):
    """PPO without an upper clip for young tokens."""
    ratios = torch.exp(logprobs - behaviour_logprobs)
    high = torch.where(ages == 0, 10.0, 1.2)
    return -torch.minimum(ratios * advantages, torch.minimum(ratios.clamp(min=0.8), high) * advantages)


def summed(logprobs, behaviour_logprobs, advantages, mask, ages):
    """Wrong: one number instead of one per token."""
    return -(logprobs * advantages).sum()


def spin(logprobs, behaviour_logprobs, advantages, mask, ages):
    """Never comes back."""
    while True:
        pass
