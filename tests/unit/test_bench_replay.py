"""The schedule's own speed, by hand and against the recorded virtual clock."""

import pytest

from bench.replay import replay
from pipeline.schedule import ScheduleRules
from tests import vectors


def rules(**changes) -> ScheduleRules:
    values = {"groups_per_step": 1, "group_size": 2, "max_staleness": 0, "steps": 3, "num_rows": 100}
    return ScheduleRules(**(values | changes))


def test_synchronous_training_adds_sampling_and_training():
    played = replay(rules(), durations=[[4.0, 6.0]], concurrency=2, train_seconds=[3.0])
    assert [(step.train_at, step.end_at) for step in played.steps] == [(6, 9), (15, 18), (24, 27)]
    assert played.seconds == 27
    assert played.busy_frac == 9 / 27


def test_sampling_ahead_hides_the_shorter_of_both():
    # All three groups are admitted at 0 and done at 6; from then on only training takes time.
    played = replay(rules(max_staleness=2), durations=[[4.0, 6.0]], concurrency=6, train_seconds=[3.0])
    assert [step.train_at for step in played.steps] == [6, 9, 12]
    assert played.seconds == 15


def test_concurrency_queues_trajectories_in_admission_order():
    # Two places: group 0 takes both until 4 and 6, group 1 starts at 4 and 6, and so on.
    played = replay(rules(max_staleness=2), durations=[[4.0, 6.0]], concurrency=2, train_seconds=[0.0])
    # places: [0.0 0-4, 1.0 4-8, 2.0 8-12], [0.1 0-6, 1.1 6-12, 2.1 12-18]
    assert [step.train_at for step in played.steps] == [6, 12, 18]


def test_one_place_runs_one_trajectory_at_a_time():
    played = replay(rules(steps=1), durations=[[4.0, 6.0]], concurrency=1, train_seconds=[1.0])
    assert played.seconds == 11


def test_a_straggler_at_the_bound_makes_the_trainer_wait():
    # K = 1: groups 0 and 1 are admitted at version 0. Group 1 trains first; then group 0 must train at version 1, the
    # last one it may, although group 2 is ready from 3 + 1 on.
    played = replay(
        rules(max_staleness=1, steps=3, group_size=1),
        durations=[[20.0], [1.0], [1.0]],
        concurrency=9,
        train_seconds=[2.0],
    )
    assert [step.groups for step in played.steps] == [(1,), (0,), (2,)]
    assert [step.train_at for step in played.steps] == [1, 20, 22]
    assert [step.wait_seconds for step in played.steps] == [0, 16, 0]


def test_short_lists_are_used_again_from_their_start():
    played = replay(rules(), durations=[[1.0], [2.0]], concurrency=1, train_seconds=[10.0, 20.0])
    assert [step.end_at for step in played.steps] == [1 + 10, 11 + 2 + 20, 33 + 1 + 10]


@pytest.mark.parametrize(
    "wrong", [{"durations": []}, {"durations": [[]]}, {"concurrency": 0}, {"train_seconds": []}], ids=str
)
def test_impossible_replays_are_refused(wrong):
    arguments = {"durations": [[1.0]], "concurrency": 1, "train_seconds": [1.0]} | wrong
    with pytest.raises(ValueError, match="replay needs"):
        replay(rules(), **arguments)


def always_updates(parameter) -> bool:
    (vector,) = parameter.values
    return vector is None or (
        vector["params"].get("on_stragglers") is None and all(step["updated"] for step in vector["expected"])
    )


@pytest.mark.parametrize("vector", list(filter(always_updates, vectors.load("schedule"))))
def test_replay_keeps_the_recorded_clock(vector):
    params = vector["params"]
    played = replay(
        ScheduleRules(
            groups_per_step=params["groups_per_step"],
            group_size=1,
            max_staleness=params["max_staleness"],
            steps=params["steps"],
            num_rows=params["dataset_rows"],
            stale_policy=params["stale_policy"],
            admit_ahead=params["admit_ahead"],
            oversample_factor=params["oversample_factor"],
            batch_order=params["batch_order"],
            repeat_dataset=params["repeat_dataset"],
        ),
        durations=[[group["start_delay"] + sum(group["segments"])] for group in vector["script"]["groups"]],
        concurrency=10_000,
        train_seconds=vector["script"]["train_ticks"],
    )
    assert [list(step.groups) for step in played.steps] == [step["consumed"] for step in vector["expected"]]
    assert [step.end_at for step in played.steps] == [step["end_tick"] for step in vector["expected"]]
    assert [step.wait_seconds for step in played.steps] == [step["wait_ticks"] for step in vector["expected"]]
