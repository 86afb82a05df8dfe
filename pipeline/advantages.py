"""Advantages: how much better a trajectory did than its baseline.

Rewards come as one list per group; None marks a member that is excluded: it counts in no mean, and its advantage is 0.
Deviations are those of the population. Rewards that are equal but for rounding have an advantage of exactly zero: a
residue of 1e-16 divided by its own deviation would otherwise become a gradient. Equal are the rewards of a baseline
(a group's, or the batch's) that lie within 1e-6 of the largest one's magnitude, since a reward may come from float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Literal

from pipeline.config_checks import is_finite_number
from pipeline.errors import ConfigError, ConfigTypeError, RunError
from pipeline.wording import shown

Rewards = Sequence[Sequence[float | None]]

# Both relative to the largest reward around. Rewards of one baseline that all lie this close are equal: float32 rounds
# to 6e-8, and a reward may be a sum of several such numbers.
_EQUAL = 1e-6
# One that lies this close to its mean has no advantage: float64 sums of a few dozen terms round to about 1e-15.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCentered:
    """Reward minus the mean of its group.

    standardize: False; True, divide by the deviation within the group; "batch", divide all advantages by their common
    deviation. Deviations below `eps` count as `eps`. A group with fewer than `min_members` rewards is measured against
    the whole batch instead.
    """

    standardize: bool | Literal["batch"] = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(self, (False, True, "batch"))

    def compute(self, rewards: Rewards, min_members: int = 2) -> list[list[float]]:
        """Advantages in the shape of `rewards`. Raises RunError for a reward that is not finite."""
        centred, deviation = self.compute_deferred(rewards, min_members)
        return centred if deviation == 1.0 else [[value / deviation for value in group] for group in centred]

    def compute_deferred(self, rewards: Rewards, min_members: int = 2) -> tuple[list[list[float]], float]:
        """(advantages short of the division by their common deviation, that deviation: 1 unless "batch")."""
        everyone = _usable(rewards)
        advantages = []
        for group in rewards:
            own = [reward for reward in group if reward is not None]
            baseline = own if len(own) >= min_members else everyone
            advantages.append(_against(group, baseline, self.standardize is True, self.eps))
        if self.standardize != "batch" or len(everyone) < 2:
            return advantages, 1.0
        centred = [
            value
            for values, group in zip(advantages, rewards, strict=True)
            for value, reward in zip(values, group, strict=True)
            if reward is not None
        ]
        return advantages, max(_mean_and_deviation(centred)[1], self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batchwise:
    """Reward minus the mean of the whole batch; with `standardize`, over the batch's deviation (at least `eps`)."""

    standardize: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(self, (False, True))

    def compute(self, rewards: Rewards, min_members: int = 2) -> list[list[float]]:
        """Advantages in the shape of `rewards`; `min_members` plays no part. Raises RunError for bad rewards."""
        everyone = _usable(rewards)
        return [_against(group, everyone, self.standardize, self.eps) for group in rewards]


Advantage = GroupCentered | Batchwise


def all_equal(rewards: Sequence[float | None]) -> bool:
    """Whether a group's usable rewards are equal but for rounding, so that each is its own baseline; also of none."""
    usable = _usable([rewards])
    return not any(_against(usable, usable, False, 0.0))


def _check(estimator: Advantage, choices: tuple[bool | str, ...]) -> None:
    name = type(estimator).__name__
    standardize, eps = estimator.standardize, estimator.eps
    if not isinstance(standardize, bool) and not (isinstance(standardize, str) and "batch" in choices):
        raise ConfigTypeError(
            f"{name}.standardize is {standardize!r}; it must be one of {', '.join(map(repr, choices))}."
        )
    if standardize not in choices:
        raise ConfigError(f"{name}.standardize is {standardize!r}; it must be one of {', '.join(map(repr, choices))}.")
    if not is_finite_number(eps) or eps <= 0:
        raise ConfigError(
            f"{name}.eps is {shown(eps)}; it bounds a deviation from below, so it must be a finite number above 0."
        )


def _usable(rewards: Rewards) -> list[float]:
    """All rewards that are not excluded, in order."""
    values = [reward for group in rewards for reward in group if reward is not None]
    for value in values:
        if not isfinite(value):
            raise RunError(
                f"A reward is {value}; advantages need finite numbers, and a failed score must not become one."
            )
    return values


def _against(group: Sequence[float | None], baseline: Sequence[float], standardize: bool, eps: float) -> list[float]:
    """The group's rewards less the baseline's mean and, with `standardize`, over its deviation; 0 where excluded."""
    if not baseline:
        return [0.0] * len(group)
    largest = max(map(abs, baseline))
    if max(baseline) - min(baseline) <= _EQUAL * largest:
        return [0.0] * len(group)
    mean, deviation = _mean_and_deviation(baseline)
    rounding = _ROUNDING * largest
    divisor = max(deviation, eps) if standardize else 1.0
    centred = [0.0 if reward is None else reward - mean for reward in group]
    return [0.0 if abs(value) <= rounding else value / divisor for value in centred]


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sqrt(sum((value - mean) ** 2 for value in values) / len(values))
