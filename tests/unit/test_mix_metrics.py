"""What a step says of each environment of a mix."""

from pipeline.data.mixed_rows import mix_rows
from pipeline.training.mix_metrics import mix_metrics
from pipeline.trajectory import Group, Trajectory


def group(number, row, *rewards):
    members = [Trajectory(number, member, row, reward=reward) for member, reward in enumerate(rewards)]
    return Group(number, row, 0, members)


def test_groups_and_rewards_are_told_apart_by_environment():
    rows = mix_rows({"sums": [{"n": 1}, {"n": 2}], "orders": [{"n": 3}], "idle": [{"n": 4}]})
    names = [row["environment"] for row in rows]
    sums, orders = names.index("sums"), names.index("orders")
    batch = [group(0, sums, 1.0, 0.0), group(1, orders, -1.0, -3.0), group(2, sums + 1, 1.0)]
    assert mix_metrics(rows, batch) == {
        "mix/sums/groups": 2,
        "mix/orders/groups": 1,
        "mix/idle/groups": 0,
        "mix/sums/reward_mean": 2 / 3,
        "mix/orders/reward_mean": -2.0,
    }
