"""What one forward pass computes: pure rules over numpy arrays, one entry per running sequence.

A sequence's *pending* tokens are those it knows but whose KV is not computed: one while it decodes, more during
prefill. A pass takes pending tokens of any sequences of one policy version, all decodes first, then prefill in
chunks. For attention sequences of like size are grouped, so that padding them to a common shape wastes little.
"""

import numpy as np

SHORT_QUERY = 8  # so many new tokens of a sequence, and
SHORT_KEYS = 128  # so much context, are padded to each other; beyond, to less than four times their length


def share_budget(pending: np.ndarray, budget: int) -> np.ndarray:
    """pending int64 [B], first come first served -> how many tokens each takes, int64 [B], in all at most `budget`.

    Decoding sequences (one pending) come first: they hold memory and are nearest to their end. Then prefill, in
    order; the last one to get a share may get only a chunk. At least one token is taken when anything is pending and
    budget >= 1.
    """
    if int(pending.sum()) <= budget:
        return pending.copy()
    order = np.argsort(pending > 1, kind="stable")
    ordered = pending[order]
    before = np.cumsum(ordered) - ordered
    takes = np.empty_like(pending)
    takes[order] = np.clip(budget - before, 0, ordered)
    return takes


def attention_groups(takes: np.ndarray, ends: np.ndarray) -> list[tuple[int, list[np.ndarray]]]:
    """takes, ends int64 [B] (new tokens, context length after them) -> [(key class, [indices [n], ...]), ...].

    Sequences of one key class share a window of KV; in it, each array of indices is attended to at once. Key class 0
    holds contexts up to SHORT_KEYS tokens, each further class four times as many; likewise new tokens from SHORT_QUERY
    on. Indices keep their order, and each sequence is in one array.
    """
    if takes.max() <= SHORT_QUERY and ends.max() <= SHORT_KEYS:
        return [(0, [np.arange(len(takes))])]
    query_class = _size_class(takes, SHORT_QUERY)
    key_class = _size_class(ends, SHORT_KEYS)
    groups = []
    for one in np.unique(key_class).tolist():
        is_here = key_class == one
        queries = np.unique(query_class[is_here])
        groups.append((one, [np.flatnonzero(is_here & (query_class == query)) for query in queries]))
    return groups


def _size_class(sizes: np.ndarray, smallest: int) -> np.ndarray:
    """0 for sizes up to `smallest`, k for sizes up to smallest * 4**k."""
    classes = np.zeros(len(sizes), dtype=np.int64)
    limit, largest = smallest, int(sizes.max())
    while limit < largest:
        classes += sizes > limit
        limit *= 4
    return classes


def assign_lanes(current: np.ndarray) -> np.ndarray:
    """current int64 [B], each sequence's lane or -1 -> a permutation of 0 … B-1 that moves as few as possible.

    Lanes are the rows of a window of KV. They are kept without gaps: a lane at or beyond B moves, the others stay.
    """
    num = len(current)
    stays = (current >= 0) & (current < num)
    if stays.all():
        return current.copy()
    lanes = current.copy()
    is_free = np.ones(num, dtype=bool)
    is_free[current[stays]] = False
    lanes[~stays] = np.flatnonzero(is_free)
    return lanes


def token_places(starts: np.ndarray, takes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """starts, takes int64 [B] -> (sequence index [N], position [N]) of each token taken, sequence by sequence."""
    if int(takes.max()) == 1 == int(takes.min()):
        return np.arange(len(takes)), starts
    sequence = np.repeat(np.arange(len(takes)), takes)
    first = np.cumsum(takes) - takes
    return sequence, np.arange(len(sequence)) - (first - starts)[sequence]
