"""Which checkpoints stay, and from where on the journal does: pure rules.

Version 0 can always be had again, from the model's own weights: with the journal from its file 0 on it counts as a
checkpoint, too, though nothing of it is in the run's directory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.run_dir.run_files import FIRST_JOURNAL_FILE


@dataclass(frozen=True, slots=True)
class Kept:
    """versions: whose checkpoints stay. journal: the ordinal of the oldest file of the journal that stays."""

    versions: frozenset[int]
    journal: int


def what_stays(
    complete: Mapping[int, int],
    *,
    oldest_needed: int,
    keep: int,
    keep_best: int = 0,
    rewards: Mapping[int, float] | None = None,
    unscored: Collection[int] = (),
) -> Kept:
    """complete: version -> ordinal of the journal's file that its state names. oldest_needed: the oldest version that a
    lease, an owed group or an evaluation may still ask for. rewards: mean held-out reward by version. unscored:
    versions whose evaluation has not ended.

    For recovery stay the `keep` newest (the second serves when the first is damaged), and the newest one from which
    `oldest_needed` can be reached by replay; so does the journal from the oldest of these on. The `keep_best` best, and
    those that may yet be among them, stay for their weights alone.
    """
    bases = sorted([(0, FIRST_JOURNAL_FILE), *complete.items()], reverse=True)  # (version, ordinal), newest first
    recovery = set(bases[:keep])
    recovery.add(next(base for base in bases if base[0] <= oldest_needed))
    best = set(best_versions(complete, rewards or {}, keep_best))
    if keep_best:
        best |= set(unscored) & complete.keys()
    versions = {version for version, _ in recovery} | best
    return Kept(frozenset(versions & complete.keys()), min(ordinal for _, ordinal in recovery))


def best_versions(versions: Collection[int], rewards: Mapping[int, float], count: int) -> list[int]:
    """The `count` of `versions` with the highest rewards, best first; of equal ones the newer is better."""
    scored = [version for version in versions if version in rewards]
    return sorted(scored, key=lambda version: (rewards[version], version), reverse=True)[:count]
