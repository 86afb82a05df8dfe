"""Which version a request takes, against the sentences that promise it, over whole random trajectories."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import KVCache
from pipeline.rollouts.version_choice import choose_version

HOLD = st.builds(KVCache, max_staleness=st.integers(1, 4))
REFILL = st.builds(KVCache, max_staleness=st.integers(0, 4), on_limit=st.just("refill"), allow_reprefill=st.just(True))


@given(
    kv_cache=HOLD | REFILL,
    admitted=st.integers(0, 3),
    turns=st.lists(
        st.tuples(
            st.integers(0, 3),  # updates before the request
            st.sets(st.integers(0, 60)),  # versions whose slots are still there, besides those that must be
            st.booleans(),  # the KV was lost, and computed anew under the request's version
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_versions_rise_within_the_age_of_the_kv(kv_cache, admitted, turns):
    committed, last, anchor = admitted, None, None
    for updates, others, lost in turns:
        committed += updates
        resident = {version for version in others if version <= committed} | {committed}
        if last is not None and kv_cache.on_limit == "hold":
            resident.add(last)  # by its lease
        choice = choose_version(kv_cache, committed=committed, resident=resident, last=last, anchor=anchor)
        version = choice.version
        assert version in resident
        assert max(admitted, last or 0) <= version <= committed
        if last is None:
            assert choice == (committed, False)
            anchor = version
        elif kv_cache.on_limit == "refill":
            assert version == committed
            assert choice.rebuilds_kv == (committed - anchor > kv_cache.max_staleness)
        else:
            assert not choice.rebuilds_kv
            assert version - anchor <= kv_cache.max_staleness
            assert not [one for one in resident if version < one <= anchor + kv_cache.max_staleness]
        last, anchor = version, version if lost or choice.rebuilds_kv else anchor
        assert 0 <= last - anchor <= kv_cache.max_staleness
