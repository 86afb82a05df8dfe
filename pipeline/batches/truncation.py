"""What a truncated trajectory counts for: in its baseline, and in training.

zero_reward: as a failure, reward 0, and trained. reward: as it was scored, and trained. drop: its score stays in the
baseline, but it is not trained. drop_and_exclude_from_baseline: neither. A trajectory that ended by itself has no
policy (None) and counts as it was scored. Which policy a cause has is the user's `Truncation`.
"""

from collections import Counter
from collections.abc import Sequence

from pipeline.config import Truncation
from pipeline.trajectory import Trajectory


def baseline_rewards(trajectories: Sequence[Trajectory], truncation: Truncation) -> list[float | None]:
    """The reward of each that enters the baseline and the advantage; None: excluded."""
    rewards = []
    for trajectory in trajectories:
        policy = truncation.policy(trajectory.truncated)
        reward = 0.0 if policy == "zero_reward" else trajectory.reward
        rewards.append(None if policy == "drop_and_exclude_from_baseline" else reward)
    return rewards


def is_dropped(policy: str | None) -> bool:
    """Whether the trajectory gives no training row."""
    return policy is not None and policy.startswith("drop")


def why_nothing_was_sampled(trajectories: Sequence[Trajectory]) -> str:
    """In a sentence or two, with what to do; of trajectories none of which has a generated token."""
    causes = Counter(trajectory.truncated for trajectory in trajectories)
    if causes["context"]:
        longest = max(trajectory.context_tokens for trajectory in trajectories)
        return (
            f"the prompts ({longest} tokens the longest) leave no room in the context. Raise "
            "Budget.max_context_tokens, or shorten the prompts."
        )
    return (
        f"its trajectories ended by {', '.join(sorted(map(str, causes)))} before their first one. Check the model and "
        "its limits, or drop such trajectories with Truncation(by_cause={'empty_sample': 'drop'})."
    )
