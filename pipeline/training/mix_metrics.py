"""Of a batch from a mix: how much of it each environment had, and what it earned there."""

from collections.abc import Sequence

import numpy as np

from pipeline.data.mixed_rows import MixedRows
from pipeline.dataset import ENVIRONMENT_KEY
from pipeline.trajectory import Group


def mix_metrics(rows: MixedRows, groups: Sequence[Group]) -> dict[str, float]:
    """`mix/<environment>/groups` of every environment, and its mean raw reward where it had a trajectory."""
    metrics: dict[str, float] = {f"mix/{name}/groups": 0 for name in rows.names}
    rewards: dict[str, list[float]] = {name: [] for name in rows.names}
    for group in groups:
        name = rows[group.row][ENVIRONMENT_KEY]
        metrics[f"mix/{name}/groups"] += 1
        rewards[name] += [one.reward for one in group.trajectories]
    return metrics | {f"mix/{name}/reward_mean": float(np.mean(of)) for name, of in rewards.items() if of}
