"""Which groups form a chunk, and that chunks times their common factor are the batch."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import make_batch
from pipeline.batches.overlap import ReadyGroup, StreamedBatch, fill_chunks, join, overlap_of, split_by_group
from pipeline.config import Adam, ForwardBackwardBatch, GroupCompletion, KVCache, Truncation
from pipeline.errors import ConfigError
from pipeline.losses import CISPO, CustomLoss
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.training.updates import Counts, merge_chunks
from pipeline.trajectory import Group, Span, Trajectory

ROWS = ForwardBackwardBatch(min_sequences=4, min_tokens=None)


def config(**options):
    defaults = {
        "engine": EngineConfig(),
        "optimizer": Adam(lr=1e-4),
        "completion": GroupCompletion(mode="wait"),
        "max_staleness": 0,
        "groups_per_step": 2,
        "loss": CISPO(normalize="token"),
    }
    return TrainerConfig(**(defaults | options))


def make_group(index, rewards, causes=None):
    """Members of different lengths; causes: of their truncation."""
    group = Group(index, index, 0)
    for member, reward in enumerate(rewards):
        length = 1 + (3 * index + member) % 5
        spans = [Span("prompt", [1, 2]), Span("generated", [3] * length, 0, 0, [-1.0] * length)]
        cause = causes[member] if causes else None
        group.trajectories.append(Trajectory(index, member, index, spans, reward, truncated=cause))
    return group


def streamed(groups, thresholds, order, normalize="token", standardize=False, min_members=2):
    """(chunks after each arrival, chunks of the flush, the batch, the same batch in one piece)."""
    rules = BatchRules(
        advantage=GroupCentered(standardize=standardize),
        normalize=normalize,
        truncation=Truncation(train="drop_and_exclude_from_baseline"),
        min_members=min_members,
        streamed=True,
    )
    batch = StreamedBatch(thresholds, 0, rules)
    chunks = [batch.add(groups[index]) for index in order]
    rest, training = batch.flush(groups)
    return chunks, rest, training, make_batch(groups, 0, replace(rules, streamed=False))


def test_a_chunk_holds_whole_groups_until_a_threshold_is_reached():
    ready = [ReadyGroup(7, 3, 30), ReadyGroup(2, 3, 30), ReadyGroup(5, 0, 0), ReadyGroup(4, 3, 30)]
    assert fill_chunks(ready, ROWS, flush=False) == [[7, 2]]
    assert fill_chunks(ready, ROWS, flush=True) == [[7, 2], [4]]
    assert fill_chunks(ready, ForwardBackwardBatch(min_sequences=None, min_tokens=30), flush=False) == [[7], [2], [4]]
    assert fill_chunks(ready, ForwardBackwardBatch(min_sequences=100, min_tokens=31), flush=False) == [[7, 2]]
    assert fill_chunks([], ROWS, flush=True) == []


def test_a_group_with_too_few_rewards_waits_for_the_flush_which_is_split_too():
    alone = ["turns", "turns", "turns", None]  # one reward counts: less than min_members
    groups = [make_group(0, [0.0, 1.0, 0.0, 1.0]), *(make_group(i, [1.0, 0.0, 0.5, i / 9], alone) for i in range(1, 6))]
    chunks, rest, training, _ = streamed(groups, ForwardBackwardBatch(min_sequences=2), order=[5, 4, 0, 1, 2, 3])
    assert [[rows.groups.tolist() for rows in part] for part in chunks] == [[], [], [[0, 0, 0, 0]], [], [], []]
    assert [rows.groups.tolist() for rows in rest] == [[5, 4], [1, 2], [3]]
    assert training.rows.num_rows == 9


def test_a_group_with_fewer_rewards_than_min_members_is_never_its_own_baseline():
    """Two rewards count, and three are needed: alone it would have advantages, but not those of its batch."""
    groups = [make_group(0, [0.0, 1.0, 0.0, 1.0]), make_group(1, [1.0, 0.0, 0.5, 0.3], ["turns", None, None, "turns"])]
    chunks, rest, training, whole = streamed(groups, ForwardBackwardBatch(min_sequences=1), [1, 0], min_members=3)
    assert [[rows.groups.tolist() for rows in part] for part in chunks] == [[], [[0, 0, 0, 0]]]
    (flushed,) = rest
    expected = split_by_group(whole.rows)[1]
    np.testing.assert_allclose(flushed.weights * training.gradient_scale, expected.weights, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("standardize", [False, True, "batch"])
@pytest.mark.parametrize("normalize", ["token", "sequence", "batch", "sum", "prompt"])
def test_chunks_times_their_factor_weigh_what_the_whole_batch_does(normalize, standardize):
    causes = [None, "turns", "turns", None]
    groups = [make_group(index, [index / 4, 1.0, 0.3, 0.0], causes if index % 2 else None) for index in range(6)]
    groups.append(make_group(6, [1.0, 0.0, 0.5, 0.7], ["turns", "turns", "turns", None]))
    chunks, rest, training, whole = streamed(groups, ROWS, [3, 6, 0, 5, 1, 4, 2], normalize, standardize)
    parts = [rows for part in chunks for rows in part] + rest
    assert len(parts) > 2
    for rows in (*parts, whole.rows):  # as they are, they go into the queue
        assert [array.dtype.name for array in rows.payload()] == ["int32"] * 2 + ["float32"] * 3 + ["int32"]
        assert all(array.flags.c_contiguous for array in rows.payload())
    sent = split_by_group(join(parts))
    expected = split_by_group(whole.rows)
    assert set(sent) == set(expected)
    for group, rows in expected.items():
        np.testing.assert_allclose(sent[group].weights * training.gradient_scale, rows.weights, rtol=1e-6, atol=1e-9)
        assert sent[group].tokens.tolist() == rows.tokens.tolist()
        assert sent[group].members.tolist() == rows.members.tolist()


def counts(generated, trained=7, with_advantage=7):
    return Counts(generated, trained, with_advantage)


def test_means_are_weighted_by_the_predictions_behind_them():
    for name, expected in (("importance/ratio_mean", 2.5), ("train/kl", 2.0), ("importance/capped_frac", 1.2)):
        assert merge_chunks([({name: 1.0}, counts(1, 5, 9)), ({name: 3.0}, counts(3, 5, 1))], 1.0) == {
            name: pytest.approx(expected)
        }


def test_metrics_of_chunks_add_up_to_those_of_the_batch():
    chunks = [
        (
            {"train/loss": 2.0, "train/tokens": 10.0, "importance/ratio_max": 3.0},
            counts(1),
        ),
        (
            {"train/loss": 4.0, "train/tokens": 30.0, "importance/ratio_max": 2.0},
            counts(3),
        ),
    ]
    assert merge_chunks(chunks, gradient_scale=0.5) == {
        "train/loss": 3.0,
        "train/tokens": 40.0,
        "importance/ratio_max": 3.0,
    }
    assert merge_chunks([({"mismatch/max_abs_logprob": 0.25, "train/forward_seconds": 1.5}, counts(0))], 1.0) == {
        "mismatch/max_abs_logprob": 0.25,
        "train/forward_seconds": 1.5,
    }


def test_overlap_is_chosen_where_it_changes_no_update():
    assert overlap_of(config(), validates=False) == ForwardBackwardBatch()
    assert overlap_of(config(forward_backward_batch=ROWS), validates=False) == ROWS
    assert overlap_of(config(), validates=True) is None
    assert overlap_of(config(kl_coefficient=0.1), validates=False) == ForwardBackwardBatch()
    assert overlap_of(config(max_staleness=1), validates=False) is None


@pytest.mark.filterwarnings("ignore:.*(lets tokens get older|cuts long trajectories short)")
@pytest.mark.parametrize(
    "options",
    [
        {"advantage": Batchwise()},
        {"advantage": GroupCentered(standardize="batch"), "kl_coefficient": 0.1},
        {"loss": CustomLoss("math:exp", normalize="token")},
        {"completion": GroupCompletion(mode="deadline", max_straggler_tokens=1), "allow_trajectory_loss": True},
        {"stale_policy": "mask_span", "allow_trajectory_loss": True},
        {"engine": EngineConfig(sampling_policy="segment", kv_cache=KVCache(max_staleness=1))},
    ],
)
def test_overlap_is_off_where_a_chunk_would_need_the_whole_batch(options):
    assert overlap_of(config(**options), validates=False) is None


def test_explicit_chunks_are_refused_with_samples_of_older_policies():
    with pytest.raises(ConfigError, match="max_staleness is 1"):
        config(max_staleness=1, forward_backward_batch=ROWS)
