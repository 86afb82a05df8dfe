"""What a truncated trajectory counts for: in its baseline, and in training.

zero_reward: as a failure, reward 0, and trained. reward: as it was scored, and trained. drop: its score stays in the
baseline, but it is not trained. drop_and_exclude_from_baseline: neither. A trajectory that ended by itself has no
policy (None) and counts as it was scored. Which policy a cause has is the user's `Truncation`.
"""


def baseline_reward(policy: str | None, reward: float) -> float | None:
    """The reward that enters the baseline and the advantage; None: excluded."""
    if policy == "zero_reward":
        return 0.0
    return None if policy == "drop_and_exclude_from_baseline" else reward


def is_dropped(policy: str | None) -> bool:
    """Whether the trajectory gives no training row."""
    return policy is not None and policy.startswith("drop")
