"""Training rows: the token ids of trajectories end to end, with what each prediction weighs.

Letters: N tokens end to end, R rows, S spans. Each conditioning run that holds generated tokens gives one row, cut
after its last one. Entry t of a row belongs to the prediction of token t+1, so its last entry is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np

from pipeline.errors import RunError
from pipeline.trajectory import Span, Trajectory


@dataclass(slots=True)
class Rows:
    """tokens int32, weights, scales, behaviour_logprobs float32, versions int32: [N]. The others: int32 [R].

    A weight is advantage times scale; a scale is the normalisation alone, 0 where a token is not trained. `versions`
    is -1 where the predicted token was not generated; masked tokens keep their log-prob and version. groups,
    members: whose row it is. first_tokens: tokens of that trajectory in earlier runs.
    """

    lengths: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    scales: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    groups: np.ndarray
    members: np.ndarray
    first_tokens: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def payload(self) -> tuple[np.ndarray, ...]:
        """The arrays of a `ForwardBackward` payload, in wire order."""
        return self.lengths, self.tokens, self.weights, self.scales, self.behaviour_logprobs, self.versions


@dataclass(slots=True)
class Flat:
    """All rows end to end, by each token's own position, not yet by its prediction.

    tokens, versions (-1: not generated) int32, logprobs float32, trajectory_of int64: [N]. span_versions int32 [S]:
    generated spans only. row_lengths, row_trajectories, row_first_tokens: one entry per row.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    trajectory_of: np.ndarray
    span_versions: np.ndarray
    row_lengths: list[int]
    row_trajectories: list[int]
    row_first_tokens: list[int]


def flatten(trajectories: Sequence[Trajectory]) -> Flat:
    """Join lists span by span and let numpy expand the rest to tokens: a few microseconds a trajectory.

    Raises RunError for a segment without a version or a log-prob for each token, and for one that starts a run.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    span_lengths: list[int] = []
    span_versions: list[int] = []
    row_lengths: list[int] = []
    row_trajectories: list[int] = []
    row_first_tokens: list[int] = []
    for index, trajectory in enumerate(trajectories):
        first_token = 0
        for _, spans in groupby(trajectory.spans, key=attrgetter("run")):
            run = list(spans)
            num_used = len(run)
            while num_used and not (run[num_used - 1].kind == "generated" and run[num_used - 1].tokens):
                num_used -= 1
            start = len(tokens)
            for span in run[:num_used]:
                if span.kind == "generated":
                    if len(tokens) == start or not _is_whole(span):
                        raise _untrainable(trajectory, span)
                    logprobs += span.logprobs
                    span_versions.append(span.version)
                else:
                    logprobs += [0.0] * len(span.tokens)
                    span_versions.append(-1)
                tokens += span.tokens
                span_lengths.append(len(span.tokens))
            if num_used:
                row_lengths.append(len(tokens) - start)
                row_trajectories.append(index)
                row_first_tokens.append(first_token)
            first_token += sum([len(span.tokens) for span in run])
    lengths_S = np.array(span_lengths, dtype=np.int64)
    versions_S = np.array(span_versions, dtype=np.int32)
    return Flat(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.repeat(versions_S, lengths_S),
        trajectory_of=np.repeat(np.array(row_trajectories, dtype=np.int64), row_lengths),
        span_versions=versions_S[(versions_S >= 0) & (lengths_S > 0)],
        row_lengths=row_lengths,
        row_trajectories=row_trajectories,
        row_first_tokens=row_first_tokens,
    )


def weigh(
    flat: Flat, weights_N: np.ndarray, scales_N: np.ndarray, trajectories: Sequence[Trajectory], by_scale: bool
) -> Rows:
    """Move each token's values to the entry that predicts it, and leave out the rows that train nothing.

    Those are rows without a weight or, with `by_scale`, without a scale. weights_N, scales_N: of each token at its own
    position. A row starts with a prompt, whose first token nothing predicts, so nothing crosses into the row before it.
    """
    lengths = np.array(flat.row_lengths, dtype=np.int32)
    weights, scales = weights_N.astype(np.float32), scales_N.astype(np.float32)
    kept_R = np.zeros(0, dtype=bool)
    if len(lengths):
        kept_R = np.logical_or.reduceat((scales if by_scale else weights) != 0, np.cumsum(lengths) - lengths)
    kept_N = np.repeat(kept_R, lengths)
    owners = [trajectories[index] for index, kept in zip(flat.row_trajectories, kept_R, strict=True) if kept]
    return Rows(
        lengths=lengths[kept_R],
        tokens=flat.tokens[kept_N],
        weights=by_prediction(weights, 0)[kept_N],
        scales=by_prediction(scales, 0)[kept_N],
        behaviour_logprobs=by_prediction(flat.logprobs, 0)[kept_N],
        versions=by_prediction(flat.versions, -1)[kept_N],
        groups=np.array([owner.group for owner in owners], dtype=np.int32),
        members=np.array([owner.member for owner in owners], dtype=np.int32),
        first_tokens=np.array(flat.row_first_tokens, dtype=np.int32)[kept_R],
    )


def by_prediction(values_N: np.ndarray, empty: int) -> np.ndarray:
    """Each token's value at the entry that predicts it, one before its own."""
    shifted = np.full_like(values_N, empty)
    shifted[:-1] = values_N[1:]
    return shifted


def _is_whole(span: Span) -> bool:
    return span.version >= 0 and span.logprobs is not None and len(span.logprobs) == len(span.tokens)


def _untrainable(trajectory: Trajectory, span: Span) -> RunError:
    num_logprobs = 0 if span.logprobs is None else len(span.logprobs)
    return RunError(
        f"Trajectory {trajectory.group}.{trajectory.member} holds a segment of {len(span.tokens)} tokens, with "
        f"{num_logprobs} log-probs and version {span.version}. Training needs a version, a log-prob for each token and "
        "a token before the first."
    )
