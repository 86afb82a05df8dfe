"""Learning-rate schedules, counted in batches: one that is skipped for want of a gradient uses up its rate."""

from math import cos, pi

from pipeline.config import Adam


def cosine_multiplier(batch: int, *, steps: int, warmup: int = 0, floor: float = 0.0) -> float:
    """Factor of the learning rate at `batch` (from 0): up over `warmup` batches, then a half cosine down to `floor`."""
    if batch < warmup:
        return (batch + 1) / warmup
    progress = (batch - warmup) / max(1, steps - warmup - 1)
    return floor + (1.0 - floor) * (1.0 + cos(pi * progress)) / 2.0


def learning_rate(optimizer: Adam, batch: int, steps: int) -> float:
    """The rate of `batch` (from 0) in a run of `steps` batches."""
    schedule = optimizer.schedule
    if schedule is None:
        return optimizer.lr
    return optimizer.lr * cosine_multiplier(batch, steps=steps, warmup=schedule.warmup, floor=schedule.floor)
