"""The journal's records: what was admitted, what came of it, and what was trained, with which weights.

A batch is trained if and only if its record is whole. Tokens, log-probs and versions are in the `Ready` records; a
`BatchRecord` adds what the learner was told about them, so that the same rows can be sent again, bit for bit.
Letters: R rows, P predictions of generated tokens, N tokens of all rows end to end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.batches.rows import Rows, by_prediction, flatten
from pipeline.errors import JournalError
from pipeline.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group was let in on a dataset row, at the committed version. id: the row's own, if it has one."""

    group: int
    row: int
    version: int
    id: str | int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A result of the rollouts: a whole group, or a part of one."""

    group: Group


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRecord:
    """One forward/backward: its rows by name, and what their generated predictions weigh (all others weigh nothing).

    keys int32 [R, 3]: group, member and first token (the trajectory's tokens in earlier runs) of each row, in the order
    in which they were sent. weights, scales float32 [P], in the same order.
    """

    keys: np.ndarray
    weights: np.ndarray
    scales: np.ndarray

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        if not isinstance(other, ChunkRecord):
            return NotImplemented
        return self._bytes() == other._bytes()

    def _bytes(self) -> tuple[bytes, bytes, bytes]:
        return self.keys.tobytes(), self.weights.tobytes(), self.scales.tobytes()

    @property
    def trajectories(self) -> set[tuple[int, int]]:
        """(group, member) of each trajectory that has a row here."""
        return {(group, member) for group, member, _ in self.keys.tolist()}


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Batch `step` is trained, from `version` on. members: those of each part; None where groups are whole.

    updated: whether an update follows; without one there are no chunks. lr, gradient_scale: the optimizer's arguments.
    tokens, masked, dropped, age_min, age_max: what its `batch` event says.
    """

    step: int
    version: int
    groups: tuple[int, ...]
    members: tuple[tuple[int, ...], ...] | None
    updated: bool
    lr: float
    gradient_scale: float
    chunks: tuple[ChunkRecord, ...]
    tokens: int
    masked: int
    dropped: int
    age_min: int
    age_max: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A group will never train; `event` is the audit log's word. tokens: generated, and lost with it."""

    event: Literal["failed", "filtered"]
    group: int
    cause: str
    tokens: int


Record = Admitted | Ready | BatchRecord | GivenUp


def events_of(record: Record) -> tuple[tuple[str, int], ...]:
    """(event, group or step) of the audit log that stand for a record, in order; none for a part without members."""
    match record:
        case Admitted():
            return (("admitted", record.group),)
        case Ready():
            return (("ready", record.group.group),) if record.group.trajectories else ()
        case BatchRecord():
            return (("batch", record.step),)
        case GivenUp("filtered"):  # a group that was whole
            return ("ready", record.group), ("filtered", record.group)
        case GivenUp():
            return (("failed", record.group),)


def chunk_of(rows: Rows) -> ChunkRecord:
    """What the journal keeps of rows that are sent; `rows_of` gives them back."""
    generated_N = rows.versions >= 0
    keys = np.stack([rows.groups, rows.members, rows.first_tokens], axis=1).astype(np.int32)
    return ChunkRecord(keys, rows.weights[generated_N], rows.scales[generated_N])


def rows_of(chunk: ChunkRecord, trajectories: Mapping[tuple[int, int], Trajectory]) -> Rows:
    """The rows that were sent, bit for bit, from the trajectories by (group, member).

    Raises JournalError if a trajectory is not there, or is not the one that the chunk was made of.
    """
    names = list(dict.fromkeys((group, member) for group, member, _ in chunk.keys.tolist()))
    if missing := [f"{group}.{member}" for group, member in names if (group, member) not in trajectories]:
        raise JournalError(
            f"A batch of the journal trains trajectory {missing[0]} ({len(missing)} like it), of which no `ready` "
            "record is there; its files are not all there. Put them back, or start a new run."
        )
    flat = flatten([trajectories[name] for name in names])
    ends = np.cumsum(np.array(flat.row_lengths, dtype=np.int64))
    rows_by_key = {
        (*names[index], first): row
        for row, (index, first) in enumerate(zip(flat.row_trajectories, flat.row_first_tokens, strict=True))
    }
    chosen = []
    for group, member, first in chunk.keys.tolist():
        row = rows_by_key.get((group, member, first))
        if row is None:
            raise _unlike(f"trajectory {group}.{member} has no row that begins at token {first}")
        chosen.append(row)
    pieces = [np.arange(ends[row] - flat.row_lengths[row], ends[row]) for row in chosen]
    of_N = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    # Within its row each value moves to the entry that predicts it; a row's first token is predicted by nothing.
    versions, logprobs = by_prediction(flat.versions[of_N], -1), by_prediction(flat.logprobs[of_N], 0)
    generated_N = versions >= 0
    num_generated = int(np.count_nonzero(generated_N))
    if not num_generated == len(chunk.weights) == len(chunk.scales):
        raise _unlike(f"{num_generated} tokens were generated, and {len(chunk.weights)} have a weight")
    weights, scales = (np.zeros(len(of_N), dtype=np.float32) for _ in range(2))
    weights[generated_N], scales[generated_N] = chunk.weights, chunk.scales
    return Rows(
        lengths=np.array([flat.row_lengths[row] for row in chosen], dtype=np.int32),
        tokens=flat.tokens[of_N],
        weights=weights,
        scales=scales,
        behaviour_logprobs=logprobs,
        versions=versions,
        groups=chunk.keys[:, 0].copy(),
        members=chunk.keys[:, 1].copy(),
        first_tokens=chunk.keys[:, 2].copy(),
    )


def _unlike(found: str) -> JournalError:
    return JournalError(
        f"A batch of the journal and the trajectories that it names do not fit together: {found}. The journal's files "
        "were mixed up or changed; put them back, or start a new run."
    )
