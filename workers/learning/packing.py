"""Training rows, and their cut into micro-batches. Plain numpy, no torch: whoever builds rows can import it.

A row is one conditioning run: its token ids through the last generated one, and per token t, for the prediction of
token t + 1, a loss weight, the normaliser in it, a behaviour log-prob and a policy version (-1: token t + 1 was not
generated). Letters: R rows, S tokens of all rows end to end; in one micro-batch, B rows, T longest of them, N packed
input tokens, M predictions, C tokens that several rows have in common.

The members of a group begin with the same prompt. In a micro-batch it goes through the model once, whatever the number
of members: only attention sees it once a row. A prompt's last token alone is each row's own, as its prediction is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shm.errors import HeadwayError
from workers.errors import NonFiniteError


class RowsError(HeadwayError, ValueError):
    """Training rows do not fit together or do not fit the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """The payload of a `ForwardBackward` message, as arrays."""

    lengths: np.ndarray  # [R] int32
    tokens: np.ndarray  # [S] int32
    weights: np.ndarray  # [S] float32, advantage and normalisation in one; the loss is a plain sum
    scales: np.ndarray  # [S] float32, the normalisation alone; 0: masked, or its trajectory dropped
    behaviour_logprobs: np.ndarray  # [S] float32
    versions: np.ndarray  # [S] int32, of the policy that sampled the token predicted; -1: not generated

    @property
    def starts(self) -> np.ndarray:
        """[R] int64: where each row begins."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return ends - self.lengths

    def check(self, vocab_size: int, max_positions: int) -> None:
        """RowsError when the rows break their rules; NonFiniteError when a weight or log-prob is not finite."""
        total = int(self.lengths.sum(dtype=np.int64))
        arrays = (self.tokens, self.weights, self.scales, self.behaviour_logprobs, self.versions)
        sizes = [len(array) for array in arrays]
        if sizes != [total] * 5:
            raise RowsError(
                f"The rows have {total} tokens by their lengths, but their arrays hold {sizes}; send one each."
            )
        if total == 0:
            return
        if self.lengths.min() < 1 or self.lengths.max() > max_positions:
            row = int(np.argmax((self.lengths < 1) | (self.lengths > max_positions)))
            raise RowsError(
                f"Row {row} has {self.lengths[row]} tokens; the model has {max_positions} positions, so a row holds 1 "
                f"to {max_positions}. Lower the context budget or raise the model's max_positions."
            )
        generated = self.versions >= 0
        last = np.zeros(total, dtype=bool)
        last[np.cumsum(self.lengths, dtype=np.int64) - 1] = True
        rules = (
            ((self.tokens < 0) | (self.tokens >= vocab_size), self.tokens, f"token ids lie in [0, {vocab_size})"),
            (~generated & (self.weights != 0), self.weights, "a weight needs a generated token"),
            (~generated & (self.scales != 0), self.scales, "a scale needs a generated token"),
            (self.scales < 0, self.scales, "a scale is at least 0"),
            ((self.weights != 0) & (self.scales == 0), self.weights, "a weight needs a scale"),
            (last & generated, self.versions, "a row's last token predicts nothing, so its version is -1"),
        )
        for broken, values, rule in rules:
            if broken.any():
                where = int(np.argmax(broken))
                raise RowsError(f"{self.place(where)} holds {values[where]}, but {rule}. Build the rows again.")
        for name, values in (
            ("loss weight", self.weights),
            ("scale", self.scales),
            ("behaviour log-prob", self.behaviour_logprobs),
        ):
            broken = generated & ~np.isfinite(values)
            if broken.any():
                where = int(np.argmax(broken))
                raise NonFiniteError(
                    f"The {name} at {self.place(where)} is {values[where]}; it must be finite, and no parameter was "
                    "changed. Look at that row's reward and at what the sampler reported for it."
                )

    def place(self, index: int) -> str:
        """In words, where entry `index` of the arrays lies."""
        row = int(np.searchsorted(self.starts, index, side="right")) - 1
        return f"row {row}, token {index - int(self.starts[row])}"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together, as int64 / float32 arrays.

    `pad_index` [B * T] names the packed token at each place of the padded [B, T] (0 in the padding, on the right);
    `pack_index` [N] names the place of each packed token, the first one of those that several rows have in common.
    """

    shape: tuple[int, int]  # (B, T)
    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    pad_index: np.ndarray  # [B * T]
    pack_index: np.ndarray  # [N]
    common_tokens: np.ndarray  # [C] packed tokens that several rows begin with
    common_places: np.ndarray  # [C, most rows that share one] their places; -1 fills up
    predict_index: np.ndarray  # [M] packed tokens whose next token was generated
    targets: np.ndarray  # [M] those next tokens
    sources: np.ndarray  # [M] where each prediction lies in the arrays of TrainingRows
    rows: np.ndarray  # [M] which of the B rows each prediction belongs to
    num_read: int  # tokens of the rows, common ones counted in each
    needs_gradient: bool  # False: the rows are only measured


def micro_batches(rows: TrainingRows, max_tokens: int, by_scale: bool = False) -> Iterator[MicroBatch]:
    """Cut rows into micro-batches of at most `max_tokens` padded tokens (a longer row goes alone).

    Rows with the same prompt come together, those with the longest row first. Each row is read as far as its last
    prediction; rows that predict nothing are left out. Rows without weight (with `by_scale`, for a loss that trains
    tokens without advantage too: without scale) come last, in micro-batches of their own, so that they cost no backward
    pass. The same rows always get the same cut.
    """
    starts = rows.starts
    row_of = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    offsets = np.arange(len(rows.tokens)) - starts[row_of]
    generated = rows.versions >= 0
    read = np.zeros(len(rows.lengths), dtype=np.int64)
    np.maximum.at(read, row_of[generated], offsets[generated] + 1)
    prompt = read.copy()  # tokens before the first one that predicts a generated token
    np.minimum.at(prompt, row_of[generated], offsets[generated])
    weighs = np.zeros(len(rows.lengths), dtype=bool)
    weighs[row_of[(rows.scales if by_scale else rows.weights) != 0]] = True
    for needs_gradient in (True, False):
        chosen = np.flatnonzero((read > 0) & (weighs == needs_gradient))
        families = _families(rows.tokens, starts, prompt, read, chosen)
        for part in _parts(families, read, max_tokens):
            yield _micro_batch(rows, starts, read, prompt, generated, part, needs_gradient)


# A row and the number of its family, which is that of all rows that begin with the same prompt.
Member = tuple[int, int]


def _families(
    tokens: np.ndarray, starts: np.ndarray, prompt: np.ndarray, read: np.ndarray, chosen: np.ndarray
) -> list[Member]:
    """The chosen rows, family by family: the family with the longest row first, and in each the longest row first."""
    by_prompt: dict[bytes, list[int]] = {}
    for row in chosen[np.argsort(-read[chosen], kind="stable")].tolist():
        key = tokens[starts[row] : starts[row] + prompt[row]].tobytes()
        by_prompt.setdefault(key, []).append(row)
    return [(row, family) for family, members in enumerate(by_prompt.values()) for row in members]


def _parts(members: list[Member], read: np.ndarray, max_tokens: int) -> Iterator[list[Member]]:
    """Cut where the rows, padded to the longest, would exceed `max_tokens`."""
    part: list[Member] = []
    longest = 0
    for row, family in members:
        longest = max(longest, int(read[row]))
        if part and (len(part) + 1) * longest > max_tokens:
            yield part
            part, longest = [], int(read[row])
        part.append((row, family))
    if part:
        yield part


def _micro_batch(
    rows: TrainingRows,
    starts: np.ndarray,
    read: np.ndarray,
    prompt: np.ndarray,
    generated: np.ndarray,
    part: list[Member],
    needs_gradient: bool,
) -> MicroBatch:
    chosen = np.array([row for row, _ in part])
    read, starts = read[chosen], starts[chosen]
    num_rows, longest = len(part), int(read.max())
    families: dict[int, list[int]] = {}  # rows of this micro-batch that share a prompt; the first one brings it
    for index, (_, family) in enumerate(part):
        families.setdefault(family, []).append(index)
    brought = np.zeros(num_rows, dtype=np.int64)  # tokens of each row that another one brings
    for members in families.values():
        brought[members[1:]] = prompt[chosen[members[0]]]
    own = read - brought
    row_of = np.repeat(np.arange(num_rows), own)
    first = np.cumsum(own) - own  # where each row's own tokens lie among the packed ones
    positions = np.arange(len(row_of)) - (first - brought)[row_of]
    sources = starts[row_of] + positions
    pack_index = row_of * longest + positions
    pad_index = np.zeros(num_rows * longest, dtype=np.int64)
    pad_index[pack_index] = np.arange(len(row_of))
    sharing = [members for members in families.values() if len(members) > 1]
    common_tokens = [first[members[0]] + np.arange(prompt[chosen[members[0]]]) for members in sharing]
    common_places = np.full((sum(map(len, common_tokens)), max(map(len, sharing), default=0)), -1, dtype=np.int64)
    filled = 0
    for members, common in zip(sharing, common_tokens, strict=True):
        places = np.arange(len(common))[:, None] + np.array(members) * longest
        pad_index[places] = common[:, None]
        common_places[filled : filled + len(common), : len(members)] = places
        filled += len(common)
    predict_index = np.flatnonzero(generated[sources])
    predicted = sources[predict_index]
    return MicroBatch(
        shape=(num_rows, longest),
        tokens=rows.tokens[sources].astype(np.int64),
        positions=positions,
        pad_index=pad_index,
        pack_index=pack_index,
        common_tokens=np.concatenate(common_tokens) if sharing else np.zeros(0, dtype=np.int64),
        common_places=common_places,
        predict_index=predict_index,
        targets=rows.tokens[predicted + 1].astype(np.int64),
        sources=predicted,
        rows=row_of[predict_index],
        num_read=int(read.sum()),
        needs_gradient=needs_gradient,
    )
