"""Advantages, beside the recorded vectors: zero means zero, and bad input is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.errors import ConfigError, ConfigTypeError, RunError

EVERY_ESTIMATOR = [
    GroupCentered(),
    GroupCentered(standardize=True),
    GroupCentered(standardize="batch"),
    Batchwise(),
    Batchwise(standardize=True),
]


def load_case(name: str) -> dict:
    path = Path(__file__).parent.parent / "data" / "cases" / name / "case.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("estimator", EVERY_ESTIMATOR, ids=str)
@pytest.mark.parametrize(
    "rewards",
    [
        [0.7] * 3,  # the mean of three times 0.7 is not 0.7
        [0.1 + 0.2, 0.3, 0.1 + 0.2, 0.3, 0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2],
        [1e9 + 0.1] * 7,
        [-0.1] * 10,
        [0.0] * 4,
    ],
    ids=str,
)
def test_rewards_equal_but_for_rounding_have_no_advantage(estimator, rewards):
    assert estimator.compute([rewards]) == [[0.0] * len(rewards)]


def test_one_winner_keeps_all_members():
    (found,) = GroupCentered().compute([[0.0] + [0.95] * 7])
    assert found == pytest.approx([-0.95 * 7 / 8] + [0.95 / 8] * 7)


def test_a_reward_equal_to_its_mean_has_no_residue():
    (found,) = GroupCentered().compute([[0.1, 0.2, 0.3]])  # 0.2 less their mean is -2.8e-17 in float64
    assert found == [pytest.approx(-0.1), 0.0, pytest.approx(0.1)]


def test_small_differences_that_are_no_rounding_stay():
    """1e-6 of the largest reward divides the two, whatever the rewards' size."""
    for size in (1e-9, 1.0, 1e9):
        (found,) = GroupCentered().compute([[size, size * (1 + 1e-5)]])
        assert found == pytest.approx([-5e-6 * size, 5e-6 * size], rel=1e-3)
        assert GroupCentered(standardize=True).compute([[size, size * (1 + 9e-7)]]) == [[0.0, 0.0]]


@pytest.mark.parametrize("estimator", EVERY_ESTIMATOR, ids=str)
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_equal_rewards_have_no_advantage_in_either_precision(estimator, kind):
    """Whatever rounding float32 leaves in a score, the group has zero variance; one different member changes that."""
    case = load_case("HR49")
    tenth, fifth = kind(0.1), kind(0.2)
    noisy = [float(kind(reward)) for reward in case["rewards"]]
    sums = [float(tenth + fifth), float(kind(0.3)), float(kind(1.2) / kind(4.0)), float(kind(0.9) - kind(0.6))]
    for rewards in (case["rewards"], noisy, sums):
        assert max(rewards) - min(rewards) < 1e-6
        assert estimator.compute([rewards]) == [[0.0] * len(rewards)]

    control = [float(kind(reward)) for reward in case["mixed_control"]["rewards"]]
    (found,) = estimator.compute([control])
    assert all(found) and found[0] < 0 < min(found[1:])


def test_a_group_of_equal_rewards_has_zero_variance_among_others():
    noise = load_case("HR49")["rewards"]
    for standardize in (False, True, "batch"):
        equal, mixed = GroupCentered(standardize=standardize).compute([noise, [0.0, 1.0, 1.0, 0.0]])
        assert equal == [0.0] * len(noise) and all(mixed)


def test_the_deferred_deviation_completes_the_advantages():
    rewards = [[1.0, 0.0, None], [0.5, 0.25, 0.0], [None, None, 1.0]]
    estimator = GroupCentered(standardize="batch")
    centred, deviation = estimator.compute_deferred(rewards, min_members=2)
    assert centred == GroupCentered().compute(rewards, min_members=2)
    assert estimator.compute(rewards, 2) == [[value / deviation for value in group] for group in centred]
    for standardize in (False, True):
        assert GroupCentered(standardize=standardize).compute_deferred(rewards)[1] == 1.0


@pytest.mark.parametrize("estimator", EVERY_ESTIMATOR, ids=str)
def test_no_usable_reward_means_no_advantage(estimator):
    assert estimator.compute([[None, None], []]) == [[0.0, 0.0], []]


@pytest.mark.parametrize("estimator", EVERY_ESTIMATOR, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(estimator, bad):
    with pytest.raises(RunError, match="finite"):
        estimator.compute([[1.0, bad]])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: GroupCentered(standardize="group"), ConfigError),
        (lambda: GroupCentered(standardize=1), ConfigTypeError),
        (lambda: GroupCentered(standardize=None), ConfigTypeError),
        (lambda: Batchwise(standardize="batch"), ConfigTypeError),
        (lambda: GroupCentered(eps=0), ConfigError),
        (lambda: GroupCentered(eps=float("inf")), ConfigError),
        (lambda: Batchwise(eps="small"), ConfigError),
        (lambda: Batchwise(eps=True), ConfigError),
    ],
)
def test_options_are_checked(make, error):
    with pytest.raises(error, match=r"(GroupCentered|Batchwise)\.(standardize|eps) is "):
        make()
