"""What a learner that is started anew must be told, to come back to a version: where to begin, and each update since.

The supervisor keeps it (checkpoints and the journal of `design.md` §10); a process that replays it gets the same
weights and the same optimizer state, on the CPU bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.batches.rows import Rows


@dataclass(frozen=True, slots=True)
class PastUpdate:
    """One update from version `from_version` to the next: what the learner was sent for it, in that order.

    chunks: the rows of its forward/backwards, one or, with overlap, several.
    """

    batch: int
    from_version: int
    chunks: list[Rows]
    lr: float
    gradient_scale: float


class LearnerHistory(Protocol):
    """Of one run. Both may read files, and raise HeadwayError for what can't be had any more."""

    def base(self, oldest: int, is_cancelled: Callable[[], bool]) -> tuple[int, Path | None]:
        """The newest version at or before `oldest` whose weights and optimizer are on disk, undamaged, and the
        directory with them (model.safetensors, optimizer.safetensors). (0, None): the model's own first weights. Called
        in a thread, for it may read all of these; it gives up, raising anything, soon after `is_cancelled` says so.
        """

    def updates(self, after: int, to: int) -> Iterator[PastUpdate]:
        """All updates from version `after` to version `to`, in order: `to - after` of them. Batches that were not
        updates (no gradient) are none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Where a run goes on.

    history: what a learner that dies comes back from; None: its death ends the run. version: the run's first, which the
    learner comes to by replay from the history. republish: older versions that can be leased again from the start.
    """

    history: LearnerHistory | None = None
    version: int = 0
    republish: Sequence[int] = ()


class NothingTrained:
    """The history of a run that only publishes version 0."""

    def base(self, oldest: int, is_cancelled: Callable[[], bool]) -> tuple[int, Path | None]:
        return 0, None

    def updates(self, after: int, to: int) -> Iterator[PastUpdate]:
        return iter(())
