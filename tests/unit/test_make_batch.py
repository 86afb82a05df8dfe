"""From trajectories to rows, beside the recorded vectors: alignment, masks, ages, and what is refused."""

import numpy as np
import pytest

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import TrainingBatch, make_batch
from pipeline.config import Truncation
from pipeline.errors import RunError
from pipeline.trajectory import Group, Span, Trajectory


def trajectory(group: int, member: int, reward: float | None, *, version: int = 0, **more) -> Trajectory:
    """Prompt 11 12 13, generated 21 22, framing 31, generated 23; log-probs -0.1, -0.2, -0.3."""
    spans = [
        Span("prompt", [11, 12, 13]),
        Span("generated", [21, 22], version, version, [-0.1, -0.2]),
        Span("framing", [31]),
        Span("generated", [23], version, version, [-0.3]),
    ]
    return Trajectory(group, member, 0, spans, reward=reward, **more)


def group_of(*trajectories: Trajectory) -> Group:
    return Group(trajectories[0].group, 0, 0, list(trajectories))


def batch_of(*groups: Group, version: int = 0, **changes) -> TrainingBatch:
    options = {"advantage": GroupCentered(), "normalize": "sum", "truncation": Truncation()}
    return make_batch(groups, version, BatchRules(**(options | changes)))


def test_each_entry_belongs_to_the_prediction_of_the_next_token():
    rows = batch_of(group_of(trajectory(4, 0, 1.0, version=2), trajectory(4, 1, 0.0, version=2)), version=3).rows
    assert rows.num_rows == 2
    assert (rows.groups.tolist(), rows.members.tolist(), rows.lengths.tolist()) == ([4, 4], [0, 1], [7, 7])
    assert rows.tokens.tolist() == [11, 12, 13, 21, 22, 31, 23] * 2
    first = slice(0, 7)
    assert rows.weights[first].tolist() == [0, 0, 0.5, 0.5, 0, 0.5, 0]
    assert rows.behaviour_logprobs[first] == pytest.approx([0, 0, -0.1, -0.2, 0, -0.3, 0])
    assert rows.versions[first].tolist() == [-1, -1, 2, 2, -1, 2, -1]
    assert rows.weights[7:].tolist() == [0, 0, -0.5, -0.5, 0, -0.5, 0]


def test_the_payload_has_the_dtypes_of_the_wire():
    batch = batch_of(group_of(trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)))
    floats = [np.float32] * 3
    assert [array.dtype for array in batch.rows.payload()] == [np.int32, np.int32, *floats, np.int32]


def test_a_row_ends_with_its_last_generated_token():
    cut = trajectory(0, 0, 1.0)
    cut.spans.append(Span("framing", [41, 42]))
    assert batch_of(group_of(cut, trajectory(0, 1, 0.0))).rows.lengths.tolist() == [7, 7]


def test_each_conditioning_run_is_a_row():
    long = trajectory(0, 0, 1.0)
    long.spans += [
        Span("framing", [41]),
        Span("prompt", [51, 52], run=1),
        Span("generated", [61], 0, 0, [-1.0], run=1),
        Span("prompt", [71], run=2),  # nothing was generated in it: no row
    ]
    rows = batch_of(group_of(long, trajectory(0, 1, 0.0))).rows
    assert (rows.lengths.tolist(), rows.first_tokens.tolist()) == ([7, 3, 7], [0, 8, 0])
    assert rows.tokens[7:10].tolist() == [51, 52, 61]
    assert rows.weights[7:10].tolist() == [0, 0.5, 0]


def test_equal_rewards_give_no_row_and_so_no_update():
    batch = batch_of(group_of(*(trajectory(0, member, 0.7) for member in range(3))))
    assert batch.rows.num_rows == batch.rows.num_tokens == 0
    assert all(len(array) == 0 for array in batch.rows.payload())
    assert batch.metrics["train/datums"] == 0
    assert batch.metrics["train/active_tokens"] == 9  # a zero advantage is active all the same
    assert batch.metrics["reward/zero_variance_group_frac"] == 1.0


def test_members_without_advantage_leave_no_row():
    batch = batch_of(group_of(*(trajectory(0, member, reward) for member, reward in enumerate((0.0, 0.5, 1.0)))))
    assert batch.rows.members.tolist() == [0, 2]
    assert batch.metrics["train/active_sequences"] == 3


def test_ages_beyond_the_bound_are_an_error_under_wait():
    groups = group_of(trajectory(0, 0, 1.0, version=10), trajectory(0, 1, 0.0, version=11))
    assert batch_of(groups, version=12, max_age=2).age_max == 2
    with pytest.raises(RunError, match="age 3; max_staleness is 2"):
        batch_of(groups, version=13, max_age=2)
    with pytest.raises(RunError, match="1 versions newer than the learner"):
        batch_of(groups, version=10, max_age=2)


def test_masked_spans_keep_their_rewards_in_the_baseline():
    groups = group_of(trajectory(0, 0, 1.0, version=10), trajectory(0, 1, 0.0, version=12))
    batch = batch_of(groups, version=13, mask_older_than=2)
    assert batch.rows.members.tolist() == [1]
    assert batch.rows.weights.min() == -0.5  # against the mean of both
    assert (batch.num_generated, batch.num_masked, batch.num_dropped) == (6, 3, 0)
    assert batch.metrics["staleness/frac_masked"] == 0.5
    assert (batch.age_min, batch.age_max) == (1, 3)


def test_loss_mask_end_counts_generated_tokens_and_keeps_log_probs():
    cut = trajectory(0, 0, 1.0, loss_mask_end=2)
    rows = batch_of(group_of(cut, trajectory(0, 1, 0.0))).rows
    assert rows.weights[:7].tolist() == [0, 0, 0.5, 0.5, 0, 0, 0]
    assert rows.behaviour_logprobs[5] == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("policy", "members", "weight"),
    [
        ("zero_reward", [0, 1], 0.5),  # 1 against the mean of 1 and 0
        ("reward", [0, 1], 0.3),  # 1 against the mean of 1 and 0.4
        ("drop", [0], 0.3),  # its score stays in the baseline
        ("drop_and_exclude_from_baseline", [0], 1 / 3),  # alone in its group: against the batch, 1, 0.5 and 0.5
    ],
)
def test_truncation_policies(policy, members, weight):
    groups = [
        group_of(trajectory(0, 0, 1.0), trajectory(0, 1, 0.4, truncated="context")),
        group_of(trajectory(1, 0, 0.5, truncated="turns"), trajectory(1, 1, 0.5, truncated="turns")),
    ]
    truncation = Truncation(train="reward", by_cause={"context": policy})
    batch = batch_of(*groups, truncation=truncation)
    in_first_group = batch.rows.groups == 0
    assert batch.rows.members[in_first_group].tolist() == members
    assert batch.rows.weights.max() == pytest.approx(weight)
    assert batch.num_dropped == (3 if policy.startswith("drop") else 0)
    assert batch.metrics["reward/mean"] == pytest.approx(0.6)  # raw, whatever the policy
    assert batch.metrics["truncated/context"] == 0.25
    assert batch.metrics["truncated/turns"] == 0.5


@pytest.mark.parametrize("normalize", ["token", "sequence", "batch", "sum", "prompt"])
@pytest.mark.parametrize("standardize", [False, True, "batch"])
def test_streamed_rows_and_their_scale_make_the_whole_batch(normalize, standardize):
    groups = [
        group_of(trajectory(0, 0, 1.0), trajectory(0, 1, 0.2), trajectory(0, 2, 0.9, loss_mask_end=1)),
        group_of(trajectory(1, 0, 0.0), trajectory(1, 1, 1.0)),
    ]
    options = {"normalize": normalize, "advantage": GroupCentered(standardize=standardize)}
    whole, chunk = batch_of(*groups, **options), batch_of(*groups, streamed=True, **options)
    np.testing.assert_allclose(chunk.rows.weights * chunk.gradient_scale, whole.rows.weights, rtol=1e-6)
    assert whole.gradient_scale == 1.0


def test_batch_centred_advantages_are_not_streamed():
    with pytest.raises(RunError, match="Batchwise needs the rewards of the whole batch"):
        batch_of(group_of(trajectory(0, 0, 1.0)), advantage=Batchwise(), streamed=True)


def test_environment_metrics_are_summed():
    one, two = trajectory(0, 0, 1.0, metrics={"guesses": 2.0}), trajectory(0, 1, 0.0, metrics={"guesses": 4, "wins": 1})
    metrics = batch_of(group_of(one, two)).metrics
    assert (metrics["rollout/guesses"], metrics["rollout/wins"]) == (6.0, 1.0)


def test_a_trajectory_that_generated_nothing_gives_no_row():
    empty = Trajectory(0, 0, 0, [Span("prompt", [1]), Span("generated", [], 0, 0, [])], reward=0.0)
    empty.truncated = "empty_sample"
    batch = batch_of(group_of(empty, trajectory(0, 1, 1.0)))
    assert batch.rows.members.tolist() == [1]
    assert batch.metrics["train/active_sequences"] == 1
    assert batch.metrics["length/generated_p50"] == 1.5


def test_a_batch_of_nothing_but_empty_samples_is_no_update():
    empty = Trajectory(0, 0, 0, [Span("prompt", [1])], reward=0.0)
    batch = batch_of(group_of(empty))
    assert batch.rows.num_rows == 0
    assert all(np.isfinite(value) for value in batch.metrics.values())
    ages = [batch.metrics[f"staleness/span_age_{name}"] for name in ("p50", "p99", "max")]
    assert ages == [0, 0, 0]  # of none
    assert "holds no sampled token" in batch.mistake


def test_prompts_that_leave_no_room_are_named_as_the_mistake():
    long = Trajectory(0, 0, 0, [Span("prompt", [1] * 9)], reward=0.0, truncated="context")
    assert "(9 tokens the longest) leave no room" in batch_of(group_of(long)).mistake


def test_a_mask_over_all_of_a_batch_is_a_mistake_and_what_a_policy_leaves_out_is_none():
    masked = [trajectory(0, member, 1.0, loss_mask_end=0) for member in range(2)]
    assert "traj.loss_mask_end masks all 6 sampled tokens" in batch_of(group_of(*masked)).mistake
    assert batch_of(group_of(masked[0], trajectory(0, 1, 0.0, loss_mask_end=1))).mistake == ""
    dropped = [trajectory(0, member, 1.0, truncated="turns", loss_mask_end=0) for member in range(2)]
    assert batch_of(group_of(*dropped), truncation=Truncation(train="drop")).mistake == ""
    assert batch_of(group_of(trajectory(0, 0, 1.0)), version=9, mask_older_than=2).mistake == ""
    assert batch_of(group_of(trajectory(0, 0, 1.0), trajectory(0, 1, 1.0))).mistake == "", "no advantage, so no update"


def test_percentiles_of_one_are_that_one_and_of_several_are_interpolated():
    alone = batch_of(group_of(Trajectory(0, 0, 0, trajectory(0, 0, 1.0, version=3).spans[:2], reward=1.0)), version=5)
    assert [alone.metrics[f"staleness/span_age_{name}"] for name in ("p50", "p99", "max")] == [2, 2, 2]
    assert [alone.metrics[f"length/generated_{name}"] for name in ("p50", "p99")] == [2, 2]
    several = batch_of(group_of(*(trajectory(0, member, 0.0, version=member) for member in range(3))), version=3)
    # Two segments each of ages 1, 2 and 3: the 99th percentile lies at 0.99 * 5 = 4.95 of them, 3 and 3.
    assert [several.metrics[f"staleness/span_age_{name}"] for name in ("p50", "p99", "max")] == [2, 3, 3]
    uneven = batch_of(group_of(trajectory(0, 0, 0.0), Trajectory(0, 1, 0, trajectory(0, 1, 0.0).spans[:2], reward=0.0)))
    assert uneven.metrics["length/generated_p50"] == 2.5
    assert uneven.metrics["length/generated_p99"] == pytest.approx(2.99)


@pytest.mark.parametrize(
    "spans",
    [
        [Span("prompt", [1]), Span("generated", [2, 3], 0, 0, [-0.1])],  # a log-prob is missing
        [Span("prompt", [1]), Span("generated", [2], 0, 0, None)],
        [Span("prompt", [1]), Span("generated", [2], -1, -1, [-0.1])],  # no version
        [Span("generated", [2], 0, 0, [-0.1])],  # nothing predicts it
        [Span("prompt", [1]), Span("generated", [2], 0, 0, [-0.1]), Span("generated", [2], 0, 0, [-0.1], run=1)],
    ],
)
def test_segments_that_cannot_be_trained_are_refused(spans):
    with pytest.raises(RunError, match="Trajectory 7.3 holds a segment"):
        batch_of(group_of(Trajectory(7, 3, 0, spans, reward=1.0)))


def test_a_trajectory_without_a_reward_is_refused():
    with pytest.raises(RunError, match="Trajectory 0.1 has no reward"):
        batch_of(group_of(trajectory(0, 0, 1.0), trajectory(0, 1, None)))
