"""The gate: may this optimizer step be taken, given the groups that are still owed training? Pure integers.

The schedule asks before it names a batch and the learner asks again, from the ledger, before it steps: the same
functions, so the bound on policy age holds even if the supervisor is wrong.

Words: a group is *owed* from its admission at version `a` until it is consumed; no segment of it is older than `a`. It
may be trained at versions up to its deadline `a + max_staleness`. One update trains at most `groups_per_update` groups.
"""

from collections.abc import Iterable, Sequence


def first_blocker(owed: Sequence[int], version: int, groups_per_update: int, max_staleness: int) -> int | None:
    """Rank, oldest first, of a group that could no longer train in time after stepping to `version + 1`.

    owed: admitted version of each group that is not in this update, in any order. None means that the step is safe.
    After the step, group number `rank` (from 0) needs one of the updates at `version + 1 … admitted + max_staleness`;
    these have room for `updates_left * groups_per_update` groups, and older ones go first (earliest deadline first).
    """
    for rank, admitted in enumerate(sorted(owed)):
        updates_left = admitted + max_staleness - version
        if rank >= updates_left * groups_per_update:
            return rank
    return None


def fits(admitted: Sequence[int], version: int, groups_per_update: int, max_staleness: int) -> bool:
    """Can every owed group still be trained in time at `version` or later? The invariant of admission.

    admitted: admitted version of each owed group, in any order. True when the k-th oldest (from 1) satisfies
    `k <= (admitted + max_staleness - version + 1) * groups_per_update`: the update at `version` itself counts too, so
    this is the gate's question asked one version earlier.
    """
    return first_blocker(admitted, version - 1, groups_per_update, max_staleness) is None


def refusal(
    *,
    versions: Iterable[int],
    left_behind: Iterable[tuple[int, int]],
    from_version: int,
    groups_per_update: int,
    max_staleness: int | None,
    weightless: Iterable[int] = (),
) -> str | None:
    """Why the step from `from_version` to the next must not be taken, in one sentence; None when it may.

    versions: policy version of each segment that the update trains (repeats allowed, tokens that were not generated
    left out). left_behind: (group, admitted version) of every reservation that is not in this update. max_staleness:
    None where any age may train (stale_policy keep). weightless: versions of segments in the batch of which no token
    weighs anything (masked for their age under mask_span): they may be old, but never newer than the learner.
    """
    versions = list(versions)
    for version in (*versions, *weightless):
        if version < 0:
            return (
                f"The batch holds a segment of policy version {version}, and versions start at 0; "
                "leave out tokens that were not generated."
            )
        if version > from_version:
            return (
                f"The batch holds a segment of policy version {version}, newer than the learner's version "
                f"{from_version}; a sampler must never be ahead of the learner."
            )
    for version in versions:
        if max_staleness is not None and from_version - version > max_staleness:
            return (
                f"The batch holds a segment of policy version {version}, which is {from_version - version} updates old "
                f"at version {from_version}; max_staleness allows {max_staleness}."
            )
    if max_staleness is None:
        return None
    owed = sorted(left_behind, key=lambda reservation: (reservation[1], reservation[0]))
    if owed and owed[-1][1] > from_version:
        group, admitted = owed[-1]
        return (
            f"Group {group} is reserved as admitted at version {admitted}, which the learner, at version "
            f"{from_version}, has not reached; groups are admitted at the committed version."
        )
    rank = first_blocker([admitted for _, admitted in owed], from_version, groups_per_update, max_staleness)
    if rank is None:
        return None
    group, admitted = owed[rank]
    updates_left = max(0, admitted + max_staleness - from_version)
    return (
        f"Group {group}, admitted at version {admitted} and number {rank + 1} of the groups left behind, could no "
        f"longer train at age {max_staleness} or less: after the step from version {from_version} only {updates_left} "
        f"updates of {groups_per_update} groups remain before its deadline; train it in this update, or wait for it."
    )
