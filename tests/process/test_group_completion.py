"""Whole runs whose groups close by a deadline, and whose trajectories end or start anew by the loop's rules."""

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.tasks import guess

ROWS = guess.train_rows(0)


@pytest.fixture(scope="module")
def model():
    with rl.Supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def test_stragglers_are_truncated_at_the_deadline(model, tmp_path):
    (tmp_path / "marks").mkdir()
    trainer = make_trainer(
        model,
        tmp_path / "run",
        env="process_envs:Uneven",
        arguments={"directory": str(tmp_path / "marks")},
        budget=rl.Budget(max_turns=60, max_turn_tokens=1, max_context_tokens=128),
        completion=rl.GroupCompletion(mode="deadline", max_straggler_tokens=2),
        truncation=rl.Truncation(train="reward"),
        allow_trajectory_loss=True,
    )
    steps = rl.run(trainer, ROWS, steps=4)
    assert all(step.metrics["groups/deadline_frac"] == 1 for step in steps)
    assert all(step.metrics["truncated/group_deadline"] == 0.5 for step in steps)
    ended = events_of(tmp_path / "run", "trajectory")
    assert {event["reward"] for event in ended if event["truncated"] == "group_deadline"} == {0.25}
    assert audit(tmp_path / "run") == 0
