"""From trajectories to training rows: advantages, masks and normalisation, and the metrics that the batch determines.

The loss is the weighted sum over all tokens; nothing averages later. Active is a trajectory that is not dropped and has
an unmasked token. With A its advantage, n its unmasked tokens, M the number of active trajectories, N their unmasked
tokens, N_g those of its group and Q the number of groups that have any, each token weighs:

    token A/N   sequence A/(n·M)   batch A/M   sum A   prompt A/(N_g·Q)

Letters of array shapes: T trajectories, G groups, S generated spans, N tokens of all rows end to end.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pipeline.advantages import GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.rows import Flat, Rows, flatten, weigh
from pipeline.batches.truncation import baseline_rewards, is_dropped, why_nothing_was_sampled
from pipeline.errors import RunError
from pipeline.trajectory import Group, Trajectory


@dataclass(slots=True)
class TrainingBatch:
    """What the learner gets, and what the batch says about itself. Without rows there is no gradient, hence no update.

    gradient_scale: factor of the summed gradients that the weights leave out (1 unless `streamed`). num_generated,
    num_masked, num_dropped: generated tokens of all members, those masked for age, those of dropped members.
    advantages: of each trajectory, by group. mistake: a sentence if nothing can be trained, which no policy asked for;
    else empty.
    """

    rows: Rows
    metrics: dict[str, float]
    gradient_scale: float
    num_generated: int
    num_masked: int
    num_dropped: int
    age_min: int
    age_max: int
    advantages: list[list[float]]
    mistake: str = ""


@dataclass(frozen=True, slots=True)
class _Masks:
    """What is trained of a batch's tokens. trained_T, trained_G: how many of each trajectory (n) and of each group.
    generated_T: how many were generated. num_masked: those that are too old; num_wanted: those that neither a drop
    policy nor their age excludes.
    """

    dropped_T: np.ndarray
    generated_T: np.ndarray
    trained_N: np.ndarray
    trained_T: np.ndarray
    trained_G: np.ndarray
    num_masked: int
    num_wanted: int


def make_batch(groups: Sequence[Group], version: int, rules: BatchRules) -> TrainingBatch:
    """Rows and metrics of one batch. version: the learner's, before the update. Raises RunError for a span of an
    impossible age and for a trajectory without a reward.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    group_of_T = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    _check_rewards(trajectories)
    flat = flatten(trajectories)
    ages_S = version - flat.span_versions
    _check_ages(ages_S, rules.max_age)

    masks = _masks(trajectories, group_of_T, flat, version, rules)
    advantages, deviation = _advantages(groups, rules)
    advantages_T = np.fromiter(chain.from_iterable(advantages), dtype=np.float64, count=len(trajectories))
    own_T, common = _divisors(rules.normalize, masks, group_of_T)
    divisors_T = np.broadcast_to(own_T if rules.streamed else own_T * common, len(trajectories))
    scales_N = np.where(masks.trained_N, 1.0 / divisors_T[flat.trajectory_of], 0.0)
    weights_N = np.where(masks.trained_N, (advantages_T / divisors_T)[flat.trajectory_of], 0.0)
    rows = weigh(flat, weights_N, scales_N, trajectories, by_scale=rules.train_all)
    return TrainingBatch(
        rows=rows,
        metrics=_metrics(trajectories, ages_S, masks, advantages, rows),
        gradient_scale=1.0 / (deviation * common) if rules.streamed else 1.0,
        num_generated=int(masks.generated_T.sum()),
        num_masked=masks.num_masked,
        num_dropped=int(masks.generated_T[masks.dropped_T].sum()),
        age_min=int(ages_S.min()) if len(ages_S) else 0,
        age_max=int(ages_S.max(initial=0)),
        advantages=[[value / deviation for value in values] for values in advantages],
        mistake=_mistake(trajectories, masks),
    )


def _masks(
    trajectories: Sequence[Trajectory], group_of_T: np.ndarray, flat: Flat, version: int, rules: BatchRules
) -> _Masks:
    policies = [rules.truncation.policy(trajectory.truncated) for trajectory in trajectories]
    dropped_T = np.array([is_dropped(policy) for policy in policies], dtype=bool)
    generated_N = flat.versions >= 0
    aged_N = np.zeros_like(generated_N)
    if rules.mask_older_than is not None:
        aged_N = generated_N & (version - flat.versions > rules.mask_older_than)
    generated_T = np.bincount(flat.trajectory_of[generated_N], minlength=len(trajectories))
    wanted_N = trained_N = generated_N & ~dropped_T[flat.trajectory_of] & ~aged_N
    if any(trajectory.loss_mask_end is not None for trajectory in trajectories):
        trained_N = wanted_N & _before_mask_end(trajectories, flat.trajectory_of, generated_N, generated_T)
    trained_T = np.bincount(flat.trajectory_of[trained_N], minlength=len(trajectories))
    return _Masks(
        dropped_T=dropped_T,
        generated_T=generated_T,
        trained_N=trained_N,
        trained_T=trained_T,
        trained_G=np.bincount(group_of_T, weights=trained_T),
        num_masked=int(np.count_nonzero(aged_N)),
        num_wanted=int(np.count_nonzero(wanted_N)),
    )


def _advantages(groups: Sequence[Group], rules: BatchRules) -> tuple[list[list[float]], float]:
    """(of each trajectory, by group; what they are still to be divided by: not 1 only where that is known of the whole
    batch alone).
    """
    rewards = [baseline_rewards(group.trajectories, rules.truncation) for group in groups]
    advantage = rules.advantage
    if not rules.streamed:
        return advantage.compute(rewards, rules.min_members), 1.0
    if not isinstance(advantage, GroupCentered):
        raise RunError(f"{type(advantage).__name__} needs the rewards of the whole batch; it cannot train in chunks.")
    if rules.train_all and advantage.standardize == "batch":
        raise RunError("A loss that is no multiple of the advantage can't defer the advantages' deviation.")
    return advantage.compute_deferred(rewards, rules.min_members)


def _metrics(
    trajectories: Sequence[Trajectory],
    ages_S: np.ndarray,
    masks: _Masks,
    advantages: Sequence[Sequence[float]],
    rows: Rows,
) -> dict[str, float]:
    """advantages: of each trajectory, by group."""
    rewards = [trajectory.reward for trajectory in trajectories]
    num_generated = int(masks.generated_T.sum())
    return {
        "reward/mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward/std": float(np.std(rewards)) if rewards else 0.0,
        "reward/zero_variance_group_frac": sum(not any(values) for values in advantages) / max(1, len(advantages)),
        **_percentiles("staleness/span_age", ages_S),
        "staleness/span_age_max": float(ages_S.max(initial=0)),
        "staleness/frac_masked": masks.num_masked / max(1, num_generated),
        **_percentiles("length/generated", masks.generated_T),
        "train/generated_tokens": num_generated,
        "train/active_tokens": int(masks.trained_T.sum()),
        "train/active_sequences": int(np.count_nonzero(masks.trained_T)),
        "train/active_groups": int(np.count_nonzero(masks.trained_G)),
        "train/datums": rows.num_rows,
        "train/tokens": rows.num_tokens,
        **_shares_and_sums(trajectories),
    }


def _mistake(trajectories: Sequence[Trajectory], masks: _Masks) -> str:
    if not masks.generated_T.any() and not masks.dropped_T.all():
        return f"A batch holds no sampled token, so there is nothing to train: {why_nothing_was_sampled(trajectories)}"
    if masks.num_wanted > 0 and not masks.trained_T.any():
        return (
            f"traj.loss_mask_end masks all {masks.num_wanted} sampled tokens of a batch, so there is nothing to train. "
            "It is an offset over all tokens that a trajectory generates, of which only those before it are trained. "
            "Set it higher, or leave it out."
        )
    return ""


def _divisors(normalize: str, masks: _Masks, group_of_T: np.ndarray) -> tuple[np.ndarray | float, int]:
    """(a trajectory's own divisor [T] or 1, the divisor common to the batch): known per chunk, and only at the end."""
    trained_T, trained_G = masks.trained_T, masks.trained_G
    num_tokens = max(1, int(trained_T.sum()))
    num_sequences = max(1, int(np.count_nonzero(trained_T)))
    if normalize == "token":
        return 1.0, num_tokens
    if normalize == "sequence":
        return np.maximum(1, trained_T), num_sequences
    if normalize == "batch":
        return 1.0, num_sequences
    if normalize == "sum":
        return 1.0, 1
    if normalize == "prompt":
        return np.maximum(1, trained_G)[group_of_T], max(1, int(np.count_nonzero(trained_G)))
    raise RunError(f"normalize is {normalize!r}; there are token, sequence, batch, sum and prompt.")


def _before_mask_end(
    trajectories: Sequence[Trajectory], trajectory_of: np.ndarray, generated_N: np.ndarray, generated_T: np.ndarray
) -> np.ndarray:
    """Bool [N]: the generated tokens below their trajectory's loss_mask_end, counted over all its generated tokens."""
    no_end = np.iinfo(np.int64).max
    ends_T = np.array([no_end if t.loss_mask_end is None else t.loss_mask_end for t in trajectories], dtype=np.int64)
    earlier_T = np.cumsum(generated_T) - generated_T  # generated tokens of the trajectories before
    offsets_N = np.cumsum(generated_N) - 1 - earlier_T[trajectory_of]
    return offsets_N < ends_T[trajectory_of]


def _check_ages(ages_S: np.ndarray, max_age: int | None) -> None:
    if len(ages_S) == 0:
        return
    if ages_S.min() < 0:
        raise RunError(f"The batch holds a segment {-ages_S.min()} versions newer than the learner.")
    if max_age is not None and ages_S.max() > max_age:
        raise RunError(f"The batch holds a segment of age {ages_S.max()}; max_staleness is {max_age}.")


def _check_rewards(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise RunError(f"Trajectory {trajectory.group}.{trajectory.member} has no reward; it is not complete.")


def _percentiles(name: str, values: np.ndarray) -> dict[str, float]:
    """Linearly interpolated; 0 of nothing."""
    p50, p99 = np.percentile(values, (50, 99)) if len(values) else (0.0, 0.0)
    return {f"{name}_p50": float(p50), f"{name}_p99": float(p99)}


def _shares_and_sums(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of truncation causes that occur, and sums of the environments' own numbers."""
    causes = Counter(trajectory.truncated for trajectory in trajectories if trajectory.truncated is not None)
    sums: Counter[str] = Counter()
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            sums[name] += value
    return {f"truncated/{cause}": count / len(trajectories) for cause, count in causes.items()} | {
        f"rollout/{name}": float(total) for name, total in sums.items()
    }
