"""Runs whose environments come from elsewhere, on real processes: a mix, a file, a reward function, reasoning_gym."""

import json
from collections import Counter
from pathlib import Path

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from bench.small_models import write_small_model

CASES = Path(__file__).parent.parent / "data" / "cases"

ECHO = """
import pipeline as rl
from beside_echo import worth


class Echo(rl.Env):
    def __init__(self, word):
        self.word = word

    def reset(self, row):
        return [{"role": "user", "content": f"{self.word} {row['text']}"}]

    def on_turn(self, traj):
        return rl.TurnResult(done=True, metrics={self.word: 1})

    def reward(self, traj, row):
        return worth(traj)
"""
BESIDE = "def worth(traj):\n    return traj.member % 2\n"


@pytest.fixture(scope="module")
def model(kept, tmp_path_factory):
    with kept.supervisor(write_small_model(tmp_path_factory.mktemp("model")), device="cpu") as supervisor:
        yield supervisor


def trainer_of(model, run_dir, env, arguments=None, **options):
    """Short turns of groups of two."""
    return make_trainer(
        model,
        run_dir,
        env=env,
        arguments=arguments,
        budget=rl.Budget(max_turn_tokens=4, max_turns=1, max_context_tokens=4096),
        schedule=rl.Schedule(concurrency=16),
        **({"groups_per_step": 4, "group_size": 2} | options),
    )


def type_of_answer(text, row):
    """A number for each JSON type; the long number of case HR06 has one of its own."""
    numbers = {int: 1, str: 2, type(None): 3, float: 4, list: 5}
    return 6 if row["answer"] == 12345678901234567890 else numbers[type(row["answer"])]


def test_two_environments_are_trained_in_the_shares_that_were_asked_for(model, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "echo_envs.py").write_text(ECHO)
    (tmp_path / "far" / "beside_echo.py").write_text(BESIDE)
    env = {"echo": f"{tmp_path}/far/echo_envs.py:Echo", "sums": "reasoning_gym:chain_sum"}
    arguments = {"echo": {"word": "repeat"}, "sums": {"size": 3}}
    sums = rl.env_rows(env["sums"], arguments["sums"])
    rows = rl.mix_rows({"echo": [{"text": str(n)} for n in range(5)], "sums": sums}, weights={"echo": 3, "sums": 1})
    steps = rl.run(trainer_of(model, tmp_path / "run", env, arguments), rows, steps=3)
    assert audit(tmp_path / "run") == 0
    admitted = [rows[event["row"]]["environment"] for event in events_of(tmp_path / "run", "admitted")]
    assert all(Counter(admitted[: 4 * n]) == {"echo": 3 * n, "sums": n} for n in (1, 2, 3))
    assert sum(step.metrics["mix/echo/groups"] for step in steps) == 9
    assert sum(step.metrics["mix/sums/groups"] for step in steps) == 3
    # Each trajectory met its own environment: the metrics are those that one of them alone gives.
    assert len(admitted) == 12
    assert sum(step.metrics.get("rollout/repeat", 0) for step in steps) == 2 * 9
    assert sum(step.metrics.get("rollout/no_answer", 0) for step in steps) == 2 * 3


def test_answers_reach_the_reward_as_they_were_written(model, tmp_path):
    """Case HR06, in an environment process."""
    rows = rl.load_rows(CASES / "HR06" / "mixed_types.jsonl", prompt_field="prompt", answer_field="answer")
    found = {}

    def look(trajectories, metrics):
        found.update({trajectory.group: trajectory.reward for trajectory in trajectories})

    source = {"env": rl.SingleTurn, "arguments": {"reward": "test_mixed_environments:type_of_answer"}}
    trainer = trainer_of(model, tmp_path / "run", groups_per_step=6, validate_batch=look, **source)
    rl.run(trainer, rows, steps=1)
    assert [found[group] for group in sorted(found)] == [1, 2, 3, 4, 5, 6]
    assert audit(tmp_path / "run") == 0


def test_reward_that_no_other_process_can_import_runs_in_the_supervisor(model, tmp_path):
    seen = []

    def reward(text, row):
        seen.append(row["question"])
        return len(seen) % 2

    arguments = {"reward": reward, "prompt_field": "question"}
    rows = [{"question": "why?"}, {"question": "how?"}]
    rl.run(trainer_of(model, tmp_path / "run", rl.SingleTurn, arguments, groups_per_step=2), rows, steps=2)
    assert set(seen) == {"why?", "how?"} and len(seen) >= 8
    assert audit(tmp_path / "run") == 0


def test_reward_that_takes_other_arguments_ends_the_run_with_a_sentence(model, tmp_path):
    trainer = trainer_of(model, tmp_path / "run", rl.SingleTurn, {"reward": "json:dumps"})
    with pytest.raises(rl.HeadwayError, match=r"The reward json:dumps takes .* called as reward\(text, row\)"):
        rl.run(trainer, [{"prompt": "x"}], steps=1)


def test_rows_of_reasoning_gym_train_for_two_steps(model, tmp_path):
    env, arguments = "reasoning_gym:leg_counting", {"size": 4, "max_animals": 3}
    rows = rl.env_rows(env, arguments, seed=1)
    steps = rl.run(trainer_of(model, tmp_path / "run", env, arguments), rows, steps=2)
    assert all(step.metrics["rollout/no_answer"] == 8 for step in steps)  # a random model gives none in four tokens
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["reward/mean"] == 0.0
    assert audit(tmp_path / "run") == 0
