"""Groups that can't train are given up and replaced in mid-batch: equal rewards, failed trajectories, bad rewards."""

import json
import math
from pathlib import Path

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.tasks import guess

EQUAL, UNEQUAL = [0.1 + 0.2, 0.3, 0.3], [0.0, 1.0, 0.5]  # equal but for rounding
SHAPE = {"groups_per_step": 3, "group_size": 3}


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def rows_with(*rewards):
    """Rows with these rewards by member; None for a row whose tool fails."""
    rows = [dict(row) for row in guess.train_rows(0)[: len(rewards)]]
    for row, values in zip(rows, rewards, strict=True):
        row |= {"fails": True} if values is None else {"rewards": values}
    return rows


def train(model, run_dir, rows, steps, **options):
    trainer = make_trainer(model, run_dir, env="process_envs:RowRewards", **(SHAPE | options))
    return rl.run(trainer, rows, steps)


def rows_of(run_dir, groups):
    row_of = {event["group"]: event["row"] for event in events_of(run_dir, "admitted")}
    return [row_of[group] for group in groups]


def consumed(run_dir):
    return [group for event in events_of(run_dir, "batch") for group in event["groups"]]


@pytest.mark.filterwarnings("ignore:.*lets tokens get older")
@pytest.mark.parametrize(
    "options",
    [
        {"max_staleness": 0, "forward_backward_batch": rl.ForwardBackwardBatch(min_sequences=3)},
        {"max_staleness": 2},
        {"max_staleness": 2, "batch_order": "admission"},
        {"max_staleness": 1, "stale_policy": "keep", "allow_unbounded_staleness": True},
        {"max_staleness": 1, "stale_policy": "mask_span", "allow_trajectory_loss": True},
    ],
    ids=["overlap", "completion", "admission", "keep", "mask_span"],
)
def test_groups_of_equal_rewards_are_replaced(model, tmp_path, options):
    rows = rows_with(*(EQUAL if index % 5 in (1, 2) else UNEQUAL for index in range(10)))
    steps = train(model, tmp_path / "run", rows, 6, zero_variance="replace", **options)
    filtered = events_of(tmp_path / "run", "filtered")
    assert {row % 5 for row in rows_of(tmp_path / "run", consumed(tmp_path / "run"))} == {0, 3, 4}
    assert {row % 5 for row in rows_of(tmp_path / "run", [event["group"] for event in filtered])} == {1, 2}
    assert {event["cause"] for event in filtered} == {"zero_variance"}
    assert all(event["tokens"] > 0 for event in filtered)
    assert all(step.metrics["reward/zero_variance_group_frac"] == 0 and step.metrics["train/updated"] for step in steps)
    assert len(consumed(tmp_path / "run")) == 18
    (end,) = events_of(tmp_path / "run", "end")
    assert end["filtered"] == len(filtered) >= sum(step.metrics["groups/filtered"] for step in steps) > 0
    assert audit(tmp_path / "run") == 0


def test_last_batch_is_shorter_when_the_data_is_used_up(model, tmp_path):
    rows = rows_with(UNEQUAL, UNEQUAL, EQUAL, UNEQUAL, UNEQUAL, UNEQUAL, EQUAL, UNEQUAL)
    train(model, tmp_path / "run", rows, 2, zero_variance="replace", repeat_dataset=False, groups_per_step=4)
    assert [len(event["groups"]) for event in events_of(tmp_path / "run", "batch")] == [4, 2]
    assert sorted(rows_of(tmp_path / "run", consumed(tmp_path / "run"))) == [0, 1, 3, 4, 5, 7]
    assert audit(tmp_path / "run") == 0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_data_that_is_used_up_before_the_last_batch_ends_the_run_with_an_error(model, tmp_path, max_staleness):
    rows = rows_with(UNEQUAL, EQUAL, UNEQUAL, EQUAL)
    with pytest.raises(rl.RunError, match="used up after 1 of 2 batches: 2 groups were given up"):
        train(
            model,
            tmp_path / "run",
            rows,
            2,
            zero_variance="replace",
            repeat_dataset=False,
            groups_per_step=2,
            max_staleness=max_staleness,
        )
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["steps"], end["filtered"], end["outstanding"]) == ("failed", 1, 2, 0)
    assert audit(tmp_path / "run") == 0


def test_run_that_keeps_no_group_ends_with_an_error(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.training.intake.MAX_GIVEN_UP", 30)
    with pytest.raises(rl.RunError, match="30 groups in a row were given up .*30 had equal rewards.*zero_variance"):
        train(model, tmp_path / "run", rows_with(EQUAL, EQUAL), 2, zero_variance="replace")
    assert len(events_of(tmp_path / "run", "filtered")) == 30
    assert audit(tmp_path / "run") == 0


def test_row_that_always_fails_is_replaced_each_time_it_comes(model, tmp_path):
    rows = rows_with(UNEQUAL, UNEQUAL, None, UNEQUAL, UNEQUAL)
    steps = train(model, tmp_path / "run", rows, 6, on_failure="replace")
    failed = events_of(tmp_path / "run", "failed")
    assert set(rows_of(tmp_path / "run", [event["group"] for event in failed])) == {2}
    assert all("this row is broken" in event["cause"] for event in failed)
    assert set(rows_of(tmp_path / "run", consumed(tmp_path / "run"))) == {0, 1, 3, 4}
    (end,) = events_of(tmp_path / "run", "end")
    assert end["failed"] == len(failed) >= sum(step.metrics["groups/failed"] for step in steps) > 0
    assert audit(tmp_path / "run") == 0


def test_run_whose_groups_all_fail_ends_with_their_error(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.training.intake.MAX_GIVEN_UP", 30)
    with pytest.raises(rl.RunError, match="30 groups in a row were given up .*30 failed.*this row is broken"):
        train(model, tmp_path / "run", rows_with(None), 2, on_failure="replace")
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["failed"], end["consumed"]) == ("failed", 30, 0)
    assert audit(tmp_path / "run") == 0


# What reward functions return by mistake; "nan" and "inf" stand for the floats.
BAD = {"none": [1.0, 0.0, None], "nan": [1.0, "nan", 0.0], "inf": ["inf", 0.0, 1.0], "text": [1, True, "1"]}


def test_bad_rewards_fail_their_group_and_never_become_numbers(model, tmp_path):
    rows = rows_with([1.0, 0.0, 1.0], *BAD.values(), [0.5, 0.5, 0.5], [1, 0, True], [None, None, None])
    steps = train(model, tmp_path / "run", rows, 4, on_failure="replace", max_staleness=1)
    failed = events_of(tmp_path / "run", "failed")
    assert set(rows_of(tmp_path / "run", consumed(tmp_path / "run"))) <= {0, 5, 6}  # bool and int are numbers
    assert {row for row in rows_of(tmp_path / "run", [event["group"] for event in failed])} == {1, 2, 3, 4, 7}
    assert all("reward" in event["cause"] for event in failed)
    assert all(math.isfinite(value) for step in steps for value in step.metrics.values())
    assert all(step.metrics["reward/mean"] in (pytest.approx(11 / 18), pytest.approx(2 / 3)) for step in steps)
    assert audit(tmp_path / "run") == 0


@pytest.mark.parametrize("bad", list(BAD))
def test_bad_reward_ends_the_run_where_failures_stop_it(model, tmp_path, bad):
    with pytest.raises(rl.TrajectoryError, match="reward"):
        train(model, tmp_path / "run", rows_with([1.0, 0.0, 1.0], BAD[bad]), 3)
    assert audit(tmp_path / "run") == 0


def test_recorded_case_of_bad_rewards_is_counted_and_leaves_the_others_as_they_are(model, tmp_path):
    """Groups of the recorded case: one has equal rewards, the others a null, NaN and infinity, a text, only nulls."""
    path = Path(__file__).parent.parent / "data" / "cases" / "HR45" / "rewards.json"
    case = json.loads(path.read_text(encoding="utf-8"))["groups"]
    rewards = [[value.lower() if value in ("NaN", "inf") else value for value in group] for group in case]
    good = [1.0, 0.0, 0.0, 0.0]
    options = {"groups_per_step": 2, "group_size": 4, "max_staleness": 0, "batch_order": "admission"}
    steps = train(model, tmp_path / "run", rows_with(*rewards, good), 1, on_failure="replace", **options)
    (step,) = steps
    failed = [event["group"] for event in events_of(tmp_path / "run", "failed")]
    assert sorted(rows_of(tmp_path / "run", failed)) == [0, 1, 3, 4]
    assert rows_of(tmp_path / "run", consumed(tmp_path / "run")) == [2, 5]
    assert step.metrics["groups/failed"] == 4 and step.metrics["train/updated"] == 1
    assert step.metrics["reward/mean"] == 0.375  # (4 * 0.5 + 1) / 8
    assert step.metrics["reward/zero_variance_group_frac"] == 0.5 and step.metrics["train/datums"] == 4
    assert all(math.isfinite(value) for value in step.metrics.values())
    assert audit(tmp_path / "run") == 0
