"""Whole runs whose groups close by a deadline, and whose trajectories end or start anew by the loop's rules."""

import itertools
from collections import Counter

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.tasks import guess

ROWS = guess.train_rows(0)
RISKS = "ignore:.*(lets tokens get older|cuts long trajectories short)"


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def run_uneven(model, tmp_path, *, stragglers, steps=3, **options):
    """A run of `process_envs.Uneven`, in which members 2 and 3 of every group are stragglers."""
    (tmp_path / "marks").mkdir()
    trainer = make_trainer(
        model,
        tmp_path / "run",
        env="process_envs:Uneven",
        arguments={"directory": str(tmp_path / "marks")},
        budget=rl.Budget(max_turns=60, max_turn_tokens=1, max_context_tokens=128),
        completion=rl.GroupCompletion(mode="deadline", max_straggler_tokens=2, on_stragglers=stragglers),
        **options,
    )
    done = rl.run(trainer, ROWS, steps=steps)
    assert audit(tmp_path / "run") == 0
    return done


def members_of(events):
    return {int(event["trajectory"].partition(".")[2]) for event in events}


@pytest.mark.filterwarnings(RISKS)
def test_stragglers_are_truncated_at_the_deadline(model, tmp_path):
    policies = rl.Truncation(train="reward", by_cause={"turns": "drop"})
    steps = run_uneven(model, tmp_path, stragglers="truncate", truncation=policies, allow_trajectory_loss=True)
    for step in steps:
        assert step.metrics["groups/deadline_frac"] == 1 and step.metrics["truncated/group_deadline"] == 0.5
        assert step.metrics["reward/mean"] == (0 + 1 + 0.25 + 0.25) / 4  # stragglers are scored by on_truncated
    cut = [event for event in events_of(tmp_path / "run", "trajectory") if event["truncated"] is not None]
    assert members_of(cut) == {2, 3} and not events_of(tmp_path / "run", "discarded")


@pytest.mark.filterwarnings(RISKS)
def test_members_without_a_slot_at_the_deadline_are_left_out(model, tmp_path):
    """One trajectory at a time: the third member closes its group before the fourth has begun."""
    run_uneven(
        model,
        tmp_path,
        stragglers="truncate",
        steps=2,
        schedule=rl.Schedule(concurrency=1),
        allow_trajectory_loss=True,
    )
    discarded = events_of(tmp_path / "run", "discarded")
    ended = events_of(tmp_path / "run", "trajectory")
    assert {event["cause"] for event in discarded} == {"group_deadline"} and members_of(discarded) == {3}
    assert members_of(ended) == {0, 1, 2}


@pytest.mark.filterwarnings(RISKS)
def test_stragglers_are_carried_over_into_a_part_of_their_own(model, tmp_path):
    run_uneven(
        model,
        tmp_path,
        stragglers="carry_over",
        stale_policy="keep",
        allow_unbounded_staleness=True,
        advantage=rl.Batchwise(),
    )
    parts = [
        (group, members)
        for event in events_of(tmp_path / "run", "batch")
        for group, members in zip(event["groups"], event["members"], strict=True)
    ]
    assert parts and all(set(members) in ({0, 1}, {2, 3}, {2}, {3}, {0}, {1}) for _, members in parts)
    trained = [(group, member) for group, members in parts for member in members]
    assert len(trained) == len(set(trained)) == 3 * 16


@pytest.mark.filterwarnings(RISKS)
def test_batches_of_parts_count_trajectories_and_a_group_may_train_in_two(model, tmp_path):
    run_uneven(
        model,
        tmp_path,
        stragglers="carry_over",
        stale_policy="mask_span",
        allow_trajectory_loss=True,
        advantage=rl.Batchwise(),
        groups_per_step=3,
    )
    batches = events_of(tmp_path / "run", "batch")
    assert all(sum(map(len, batch["members"])) == 3 * 4 for batch in batches)
    groups = [set(batch["groups"]) for batch in batches]
    assert any(one & other for one, other in itertools.pairwise(groups))
    trained = Counter()
    for batch in batches:
        trained.update(group for group, part in zip(batch["groups"], batch["members"], strict=True) for _ in part)
    (end,) = events_of(tmp_path / "run", "end")
    assert end["consumed"] == sum(members == 4 for members in trained.values())


@pytest.mark.filterwarnings(RISKS)
def test_discarded_stragglers_never_train(model, tmp_path):
    steps = run_uneven(model, tmp_path, stragglers="discard", stale_policy="mask_span", allow_trajectory_loss=True)
    assert members_of(events_of(tmp_path / "run", "discarded")) == {2, 3}
    assert members_of(events_of(tmp_path / "run", "trajectory")) == {0, 1}
    assert all(step.metrics["reward/mean"] == 0.5 for step in steps)


def test_a_last_answer_is_asked_for_and_can_be_given(model, tmp_path):
    """8 tokens may be generated, one a turn; with at most 3 + 2 left the reply asks, and one more turn follows."""
    trainer = make_trainer(
        model,
        tmp_path / "run",
        env="process_envs:Talker",
        budget=rl.Budget(
            max_turns=60, max_turn_tokens=1, max_generated_tokens=8, segment_tokens=2, final_answer_reserve=3
        ),
        truncation=rl.Truncation(train="reward"),
    )
    steps = rl.run(trainer, ROWS, steps=2)
    assert all(step.metrics["truncated/final_answer"] == 1 for step in steps)
    assert all(step.metrics["length/generated_p50"] == 4 for step in steps)
    # What on_truncated saw: the prompt, four turns, and between them two replies and one with the request behind it.
    assert all(step.metrics["reward/mean"] == 1 + 4 + 2 + 2 for step in steps)
    assert audit(tmp_path / "run") == 0


def test_a_rewritten_context_trains_as_rows_of_its_own(model, tmp_path):
    trainer = make_trainer(model, tmp_path / "run", env="process_envs:Rewriter", zero_variance="train")
    steps = rl.run(trainer, ROWS, steps=2)
    for step in steps:
        # 16 trajectories of three one-token turns, each turn but the first in a context of its own; the first turn and
        # the second are trained, the third is not.
        assert step.metrics["train/generated_tokens"] == 48 and step.metrics["train/active_tokens"] == 32
        assert step.metrics["train/datums"] == 32
    assert steps[0].metrics["mismatch/max_abs_logprob"] < 1e-4  # each turn in the context it was sampled in
    assert audit(tmp_path / "run") == 0
