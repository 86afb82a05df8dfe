"""Under which policy version a trajectory's next request is computed, when segments may move on: a pure rule.

A trajectory's KV has an *anchor*: the oldest version that computed any of it. `hold` keeps the KV, and so moves on only
as far as its age allows; `refill` always takes the newest version, and rebuilds the KV when its age would be too large.
"""

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.config import KVCache


class Choice(NamedTuple):
    """A version, and whether the trajectory's KV is rebuilt under it."""

    version: int
    rebuilds_kv: bool


def choose_version(
    kv_cache: KVCache, *, committed: int, resident: Iterable[int], last: int | None, anchor: int | None
) -> Choice:
    """The version of a trajectory's next request; it is one of `resident`, and never older than `last`.

    committed: the newest version; resident: those whose weights are still in a slot, `committed` and (for `hold`, by
    the trajectory's lease) `last` among them. last, anchor: version and KV anchor of its last segment; None: the first.
    """
    if last is None or anchor is None:
        return Choice(committed, False)
    if kv_cache.on_limit == "refill":
        return Choice(committed, committed - anchor > kv_cache.max_staleness)
    limit = anchor + kv_cache.max_staleness
    return Choice(max(version for version in resident if last <= version <= limit), False)
