"""What makes a batch of groups, the same for every batch of a run."""

from dataclasses import dataclass

from pipeline.advantages import Advantage
from pipeline.config import ForwardBackwardBatch, Truncation
from pipeline.trainer_config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """mask_older_than: tokens of a greater age are not trained; max_age: a greater age is an error; None: no such
    limit. streamed: the divisors common to a batch are left to its gradient_scale. train_all: rows without advantage
    stay, for a loss with a gradient there.
    """

    advantage: Advantage
    normalize: str
    truncation: Truncation
    min_members: int = 2
    mask_older_than: int | None = None
    max_age: int | None = None
    streamed: bool = False
    train_all: bool = False

    @classmethod
    def of(cls, config: TrainerConfig, overlap: ForwardBackwardBatch | None) -> "BatchRules":
        """Those of a trainer; overlap: its thresholds (`overlap_of`), None if each batch is trained in one pass."""
        return cls(
            advantage=config.advantage,
            normalize=config.loss.normalize,
            truncation=config.truncation,
            min_members=config.completion.min_members,
            mask_older_than=config.max_staleness if config.stale_policy == "mask_span" else None,
            max_age=config.max_staleness if config.stale_policy == "wait" else None,
            streamed=overlap is not None,
            train_all=config.trains_without_advantage,
        )
