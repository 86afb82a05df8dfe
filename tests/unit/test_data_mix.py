"""Datasets mixed by weight, what is held out of one, and how a schedule takes the rows."""

import random
from itertools import pairwise

import pytest

import pipeline as rl
from pipeline.data.mixed_rows import MixedRows, order_of
from pipeline.data.split_rows import content_digest, without_holdout
from pipeline.memory.make_spec import make_rules
from pipeline.schedule import Batch, ScheduleError, Scheduler, ScheduleRules
from pipeline.trainer_config import EngineConfig, TrainerConfig

MATH = [{"q": index} for index in range(4)]
SEARCH = [{"q": "a"}, {"q": "b"}]


def config(**options):
    return TrainerConfig(
        engine=EngineConfig(seed=options.pop("seed", 0)),
        optimizer=rl.Adam(lr=1e-3),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        groups_per_step=2,
        **options,
    )


# --- mixes --------------------------------------------------------------------------------------------------------


def test_rows_of_a_mix_name_their_environment():
    mixed = rl.mix_rows({"math": MATH, "search": SEARCH}, weights={"math": 3})
    assert len(mixed) == 6 and mixed[0] == {"q": 0, "environment": "math"}
    assert mixed[-2:] == [{"q": "a", "environment": "search"}, {"q": "b", "environment": "search"}]
    assert (mixed.names, mixed.sizes, mixed.weights) == (("math", "search"), (4, 2), (3, 1.0))
    assert MATH[0] == {"q": 0}  # the user's own are left as they were
    assert mixed.parts()["search"] == mixed[4:]


def test_a_mix_is_admitted_in_its_shares():
    order = order_of(rl.mix_rows({"math": MATH, "search": SEARCH}, weights={"math": 3, "search": 1}), seed=None)
    rows = [order.row(index) for index in range(16)]
    assert [row for row in rows if row < 4] == [0, 1, 2, 3] * 3
    assert [row for row in rows if row >= 4] == [4, 5, 4, 5]


@pytest.mark.parametrize(
    ("parts", "weights", "error", "part"),
    [
        ({}, None, rl.ConfigError, "parts is empty"),
        ([MATH], None, rl.ConfigTypeError, "give a dict from environments' names to their rows"),
        ({"": MATH}, None, rl.ConfigTypeError, "give a dict from"),
        ({"a": "rows"}, None, rl.ConfigTypeError, "The rows of 'a' are str"),
        ({"a": []}, None, rl.ConfigError, "'a' has no rows"),
        ({"a": [{}, 3]}, None, rl.ConfigTypeError, "Row 1 of 'a' is 3"),
        ({"a": [{"environment": "b"}]}, None, rl.ConfigError, "Row 0 of 'a' has 'b' as its 'environment'"),
        ({"math": MATH}, {"maths": 1}, rl.ConfigError, "weights names 'maths', .* Did you mean math?"),
        ({"a": MATH}, {"a": 0}, rl.ConfigError, "The weight of 'a' is 0"),
        ({"a": MATH}, {"a": float("inf")}, rl.ConfigError, "The weight of 'a' is inf"),
        ({"a": MATH}, {"a": True}, rl.ConfigError, "The weight of 'a' is True"),
        ({"a": MATH}, [1], rl.ConfigTypeError, r"weights is \[1\]"),
    ],
)
def test_mixes_that_are_none_are_refused(parts, weights, error, part):
    with pytest.raises(error, match=part):
        rl.mix_rows(parts, weights=weights)


def test_mix_without_its_held_out_rows_is_a_mix():
    mixed = rl.mix_rows({"math": MATH, "search": SEARCH}, weights={"math": 3})
    left = without_holdout(mixed, [mixed[1], {"q": "a"}])  # the second is of no environment, so of none of these
    assert isinstance(left, MixedRows) and (left.sizes, left.weights) == ((3, 2), (3, 1.0))
    with pytest.raises(rl.ConfigError, match="All rows of 'search' are held out"):
        without_holdout(mixed, mixed[4:])


# --- what is held out ---------------------------------------------------------------------------------------------


def test_split_depends_on_content_alone():
    rows = [{"q": index, "t": [index, {"x": None}]} for index in range(200)]
    train, holdout = rl.split_rows(rows, 20)
    assert len(holdout) == 20 and [row for row in rows if row not in holdout] == train
    moved = [{"t": (float(row["q"]), {"x": None}), "q": float(row["q"])} for row in rows]  # equal content
    random.Random(1).shuffle(moved)
    assert sorted(row["q"] for row in rl.split_rows(moved, 20)[1]) == sorted(row["q"] for row in holdout)
    assert rl.split_rows(rows, 0.1) == (train, holdout)
    kept = [row for row in rl.split_rows(rows + [{"q": index} for index in range(200, 220)], 0.1)[1] if row in holdout]
    assert len(kept) >= 18  # rows that are added move few of the others


def test_split_is_the_same_on_every_machine():
    """Recorded: a row that was held out once must never be trained by a later release."""
    assert content_digest({"a": [1, "é", None, 2.5], "b": b"x"}).hex() == "c3b4ff0b224670f9e18f3a4dac3edf5c"


def test_rows_of_equal_content_stay_together():
    rows = [{"q": index // 3} for index in range(30)]
    train, holdout = rl.split_rows(rows, 4)
    assert len(holdout) == 6 and not {row["q"] for row in holdout} & {row["q"] for row in train}


def test_contents_that_differ_have_different_digests():
    values = ["1", 1, 1.5, None, [], {}, [1], ["1"], [[1]], {"1": 1}, {"a": 1, "b": 2}, {"a": 12}, "None", b"1", "", -1]
    values += [["a", "b"], ["ab"], ["a", ["b"]], [["a", "b"]], {"ab": None}, 2**63, 1e300, float("nan"), float("inf")]
    assert len({content_digest({"v": value}) for value in values}) == len(values)
    assert content_digest({"v": [True, 0.0, 2**60]}) == content_digest({"v": (1, -0.0, float(2**60))})


def test_split_of_a_mix_leaves_a_mix():
    mixed = rl.mix_rows({"math": MATH * 5, "search": [{"q": str(index)} for index in range(40)]}, weights={"math": 2})
    train, holdout = rl.split_rows(mixed, 10)
    assert isinstance(train, MixedRows) and train.weights == (2, 1.0)
    assert len(train) + len(holdout) == 60 and all("environment" in row for row in holdout)


@pytest.mark.parametrize(
    ("holdout", "error", "part"),
    [
        (0, rl.ConfigError, "holdout is 0, but there are 4 rows"),
        (4, rl.ConfigError, "holdout is 4, but there are 4 rows"),
        (1.0, rl.ConfigError, "as a share of the rows it lies between 0 and 1"),
        (0.99, rl.ConfigError, "holdout is 0.99, but there are 4 rows"),
        (True, rl.ConfigTypeError, "holdout is True"),
        ("1", rl.ConfigTypeError, "holdout is '1'"),
    ],
)
def test_splits_that_leave_nothing_are_refused(holdout, error, part):
    with pytest.raises(error, match=part):
        rl.split_rows(MATH, holdout)


def test_share_of_less_than_a_row_holds_out_one():
    assert len(rl.split_rows(MATH, 0.01)[1]) == 1


@pytest.mark.parametrize(("rows", "part"), [([{}, 3], "Row 1 is 3"), ("rows", "rows is str")])
def test_split_of_what_is_no_rows_is_refused(rows, part):
    with pytest.raises(rl.ConfigTypeError, match=part):
        rl.split_rows(rows, 1)


def test_split_of_equal_rows_is_refused():
    with pytest.raises(rl.ConfigError, match="so many are equal that none would be left to train"):
        rl.split_rows([{"q": 1}, {"q": 1}], 1)


# --- the schedule -------------------------------------------------------------------------------------------------


def rows_of(rules, steps, replaced=()):
    """Rows in order of admission of a run that replaces the groups `replaced` as soon as they are admitted."""
    scheduler, rows = Scheduler(rules), []
    for _ in range(steps):
        admissions = scheduler.admit()
        for admission in admissions:
            rows.append(admission.row)
            if admission.group in replaced:
                another = scheduler.replace(admission.group)
                if another is not None:
                    admissions.append(another)
            else:
                scheduler.receive(admission.group)
        batch = scheduler.select()
        assert isinstance(batch, Batch)
        scheduler.commit(batch, True)
    return rows


def test_shuffled_rows_come_once_each_round_also_when_groups_are_replaced():
    rules = make_rules(config(shuffle=True, max_staleness=0), rows=MATH, steps=5)
    rows = rows_of(rules, 5, replaced=(1, 4))
    rounds = [rows[start : start + 4] for start in range(0, 12, 4)]
    assert all(sorted(one) == [0, 1, 2, 3] for one in rounds) and len(rows) == 12
    assert any(one != other for one, other in pairwise(rounds))


def test_shuffled_finite_dataset_has_each_row_once():
    rules = make_rules(config(shuffle=True, repeat_dataset=False, max_staleness=0), rows=MATH, steps=2)
    assert sorted(rows_of(rules, 2)) == [0, 1, 2, 3]


def test_finite_dataset_has_each_row_once_also_when_a_group_is_replaced():
    """Its last batch is then shorter."""
    rules = make_rules(config(shuffle=True, repeat_dataset=False, max_staleness=0), rows=MATH, steps=2)
    assert sorted(rows_of(rules, 2, replaced=(1,))) == [0, 1, 2, 3]


def test_shuffle_follows_the_seed():
    rows = [{"q": index} for index in range(30)]
    orders = [rows_of(make_rules(config(shuffle=True, seed=seed), rows=rows, steps=10), 10) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert rows_of(make_rules(config(), rows=rows, steps=10), 10)[:20] == list(range(20))


def test_mix_is_shuffled_part_by_part():
    mixed = rl.mix_rows({"math": [{"q": index} for index in range(20)], "search": SEARCH}, weights={"math": 10})
    rows = rows_of(make_rules(config(shuffle=True, max_staleness=0), rows=mixed, steps=22), 22)
    first, second = ([row for row in rows if row < 20][start : start + 20] for start in (0, 20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and list(range(20)) not in (first, second)


def test_mix_can_not_end():
    mixed = rl.mix_rows({"math": MATH, "search": SEARCH})
    with pytest.raises(rl.ConfigError, match="AsyncTrainer.repeat_dataset is False, but the rows are a mix"):
        make_rules(config(repeat_dataset=False), rows=mixed, steps=1)
    assert len(make_rules(config(), rows=mixed, steps=1).row_order.sizes) == 2


def test_order_of_other_rows_is_a_bug():
    with pytest.raises(ScheduleError, match="one of 6 rows, not of 5"):
        order = order_of(rl.mix_rows({"math": MATH, "search": SEARCH}), seed=None)
        ScheduleRules(groups_per_step=1, group_size=1, max_staleness=0, steps=1, num_rows=5, row_order=order)
