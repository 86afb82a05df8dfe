"""What the generated tokens of a batch say about it: importance ratios, sampler against learner, KL and entropy."""

from collections.abc import Mapping

import numpy as np

from workers.learning.packing import TrainingRows

# In place of an infinite ratio: metrics are JSON, which has no infinity, and one such token must not end a run.
_LARGEST = float(np.finfo(np.float32).max)


def token_metrics(
    columns: Mapping[str, np.ndarray], rows: TrainingRows, order: np.ndarray, version: int
) -> dict[str, float]:
    """Means over tokens; a metric of no token, or of what the loss doesn't form, is absent.

    columns: float64 [M] each, entry i being the prediction at `order[i]` of the rows' arrays; `logprob`, and what there
    is of `ratio`, `clipped`, `capped_ratio`, `kl` and `entropy`. Ratios are over all generated tokens, capped ones over
    those of an advantage, KL and entropy over trained ones; sampler against learner over those of age 0. Infinite
    numbers count as the largest of float32. mismatch/kl estimates KL(sampler || learner) by the mean of
    rho - 1 - log rho (Schulman's k3: never negative).
    """
    metrics: dict[str, float] = {}
    everything = np.ones(len(order), dtype=bool)
    weighs, trained = rows.weights[order] != 0, rows.scales[order] != 0
    for key, name, chosen in (
        ("importance/ratio_mean", "ratio", everything),
        ("importance/clip_frac", "clipped", everything),
        ("importance/capped_mean", "capped_ratio", weighs),
        ("train/kl", "kl", trained),
        ("train/entropy", "entropy", trained),
    ):
        if name in columns and chosen.any():
            metrics[key] = float(np.minimum(columns[name][chosen], _LARGEST).mean())
    if "ratio" in columns and len(order):
        metrics["importance/ratio_max"] = float(min(columns["ratio"].max(), _LARGEST))
    if "capped_ratio" in columns and weighs.any():
        metrics["importance/capped_frac"] = float(columns["clipped"][weighs].mean())
    differences = columns["logprob"] - rows.behaviour_logprobs[order]
    current = rows.versions[order] == version
    if current.any():
        with np.errstate(over="ignore"):
            k3 = np.expm1(differences[current]) - differences[current]
        metrics["mismatch/kl"] = float(np.minimum(k3, _LARGEST).mean())
        metrics["mismatch/max_abs_logprob"] = float(np.abs(differences[current]).max())
    return metrics
