"""Synchronous overlap: the ready groups of a batch are trained in chunks while the others still sample.

Groups arrive one at a time. Rows of whole groups are collected in order of arrival until a threshold of
`ForwardBackwardBatch` is reached, and become one chunk. A group with too few rewards of its own is measured against
the whole batch, so it waits for the flush, when all have arrived. Factors that only the whole batch knows (its number
of tokens, sequences or groups, the deviation of its advantages) are left out of the chunks' weights and become one
`gradient_scale` on the summed gradients, before clipping. So the update equals that of the same rows in one pass.

Nothing here waits or sends; `training_loop.py` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import TrainingBatch, make_batch
from pipeline.batches.rows import Rows
from pipeline.batches.truncation import baseline_rewards
from pipeline.config import ForwardBackwardBatch
from pipeline.trainer_config import TrainerConfig
from pipeline.trajectory import Group

MAX_PENDING = 16  # chunks sent and not answered: what the learner is behind by stays bounded

_OF_ROWS = frozenset({"lengths", "groups", "members", "first_tokens"})  # fields of Rows with one value a row


def overlap_of(config: TrainerConfig, validates: bool) -> ForwardBackwardBatch | None:
    """The thresholds of this trainer's chunks; None: each batch is trained in one pass.

    validates: it has a `validate_batch`, which must see the whole batch before any of it trains. An explicit
    `ForwardBackwardBatch` where it can't work was refused by `TrainerConfig` and `AsyncTrainer`.
    """
    if isinstance(config.forward_backward_batch, ForwardBackwardBatch):
        return config.forward_backward_batch
    possible = config.overlap_obstacle is None and not validates
    return ForwardBackwardBatch() if possible else None


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that has arrived: its training rows, and their input tokens, prompts included."""

    group: int
    num_rows: int
    num_tokens: int


def fill_chunks(ready: Sequence[ReadyGroup], thresholds: ForwardBackwardBatch, flush: bool) -> list[list[int]]:
    """Groups of each chunk that is full, in order of arrival; with `flush` the last one needs no threshold.

    A group without rows (nothing in it has a gradient) belongs to no chunk.
    """
    chunks: list[list[int]] = []
    groups: list[int] = []
    rows = tokens = 0
    for one in ready:
        if one.num_rows == 0:
            continue
        groups.append(one.group)
        rows += one.num_rows
        tokens += one.num_tokens
        enough_rows = thresholds.min_sequences is not None and rows >= thresholds.min_sequences
        if enough_rows or (thresholds.min_tokens is not None and tokens >= thresholds.min_tokens):
            chunks.append(groups)
            groups, rows, tokens = [], 0, 0
    return [*chunks, groups] if flush and groups else chunks


class StreamedBatch:
    """One batch on its way through forward/backward: `add` each group as it arrives, then `flush` once.

    version: the learner's, before the update. rules: `streamed` ones.
    """

    def __init__(self, thresholds: ForwardBackwardBatch, version: int, rules: BatchRules) -> None:
        self._thresholds = thresholds
        self._version = version
        self._rules = rules
        self._arrived: list[int] = []
        self._rows: dict[int, Rows] = {}  # of the groups measured against themselves and not in a chunk yet
        self._submitted: set[int] = set()

    def add(self, group: Group) -> list[Rows]:
        """`group` has arrived: the chunks that are full now."""
        self._arrived.append(group.group)
        counted = [one for one in baseline_rewards(group.trajectories, self._rules.truncation) if one is not None]
        if len(counted) < self._rules.min_members:
            return []
        self._rows[group.group] = make_batch([group], self._version, self._rules).rows
        return self._take(self._rows, flush=False)

    def flush(self, groups: Sequence[Group]) -> tuple[list[Rows], TrainingBatch]:
        """The last chunks, and what the whole batch is: its metrics, and the factor that the chunks leave out.

        groups: all of the batch, in its order.
        """
        batch = make_batch(groups, self._version, self._rules)
        return self._take(split_by_group(batch.rows), flush=True), batch

    def _take(self, rows: dict[int, Rows], flush: bool) -> list[Rows]:
        waiting = [group for group in self._arrived if group in rows and group not in self._submitted]
        ready = [ReadyGroup(group, rows[group].num_rows, rows[group].num_tokens) for group in waiting]
        chunks = fill_chunks(ready, self._thresholds, flush)
        for chunk in chunks:
            self._submitted.update(chunk)
        return [join([rows[group] for group in chunk]) for chunk in chunks]


def split_by_group(rows: Rows) -> dict[int, Rows]:
    """The rows of each group that has any."""
    found = {}
    for group in np.unique(rows.groups).tolist():
        of_R = rows.groups == group
        of_N = np.repeat(of_R, rows.lengths)
        found[group] = Rows(
            **{f.name: getattr(rows, f.name)[of_R if f.name in _OF_ROWS else of_N] for f in fields(Rows)}
        )
    return found


def join(parts: Sequence[Rows]) -> Rows:
    """Rows of several batches, one after the other."""
    return Rows(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Rows)})
