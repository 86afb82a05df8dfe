"""reasoning_gym's tasks as environments: rows that messages carry whole, its own scores, and what a model may write."""

import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
from test_single_turn import roll_out

import pipeline as rl
from pipeline.adapters import reasoning_gym as adapter
from pipeline.adapters.reasoning_gym import INSTRUCTION, ReasoningGym
from pipeline.user_code.source import EnvSource

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True, scope="module")
def reasoning_gym():
    """Not at the top: every process of the tests collects this file, and a second of its processor goes into this."""
    pytest.importorskip("reasoning_gym")


def rows_of(task, size=3, seed=3, **arguments):
    return list(ReasoningGym.rows(seed, task, size=size, **arguments))


def written(answer):
    return f"I think so. <answer>{answer}</answer>"


def scored(task, row, text, **arguments):
    """The reply of a turn that writes `text`, by messages as bytes."""
    return roll_out(EnvSource(f"reasoning_gym:{task}", arguments), row, text=text)[1]


@pytest.mark.parametrize("task", ["chain_sum", "arc_1d", "simple_equations", "tower_of_hanoi", "word_ladder"])
def test_right_answer_of_a_task_is_worth_1_and_another_less(task):
    for row in rows_of(task):
        reply = scored(task, row, written(row["answer"]))
        assert reply.result["reward"] == 1.0 and reply.result["messages"] is None
        assert reply.result["metrics"] == {"no_answer": 0.0, "scorer_failed": 0.0}
        assert scored(task, row, written("none of it")).result["reward"] < 1.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_task_gives_rows_that_come_through_whole_and_scores_them():
    """Most of the minute goes into making rows of a few tasks, such as knight_swap."""
    tasks = sorted(set(adapter._tasks()) - {"composite"})
    assert len(tasks) >= 105
    for task in tasks:
        for row in msgpack.unpackb(msgpack.packb(rows_of(task, size=5)), strict_map_key=False):
            env = ReasoningGym(task)
            env.reset(row)
            if row["answer"] is not None:  # five tasks have many right answers, and name none
                assert env._scored(row["answer"]) == (1.0, False), task


def test_answer_outside_the_marks_is_none():
    (row,) = rows_of("chain_sum", size=1)
    reply = scored("chain_sum", row, row["answer"])
    assert reply.result["reward"] == 0.0 and reply.result["metrics"]["no_answer"] == 1.0


def test_prompt_is_the_question_with_how_to_answer():
    (row,) = rows_of("chain_sum", size=1)
    messages, _ = roll_out(EnvSource("reasoning_gym:chain_sum", {}), row)
    assert messages == [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]
    arguments = {"instruction": "", "system_prompt": "be brief"}
    messages, _ = roll_out(EnvSource("reasoning_gym:chain_sum", arguments), row)
    assert messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": row["question"]}]


def test_rows_follow_from_seed_size_and_the_tasks_own_configuration():
    rows = rows_of("chain_sum", size=4, min_terms=2, max_terms=2)
    assert rows == rows_of("chain_sum", size=4, min_terms=2, max_terms=2)
    assert rows != rows_of("chain_sum", size=4, seed=4, min_terms=2, max_terms=2)
    assert all(row["metadata"]["num_terms"] == 2 for row in rows)
    assert rows_of("list_functions", size=20) == rows_of("list_functions", size=20)  # it asks Python's own generator
    assert rows[:2] == rows_of("chain_sum", size=2, min_terms=2, max_terms=2, instruction="x", system_prompt="y")


def test_scorer_gets_the_tuples_that_messages_do_not_carry():
    """arc_agi and rearc compare the entry's grid, tuples of tuples, with what they have read."""
    (row,) = rows_of("rearc", size=1)
    assert scored("rearc", row, written(row["answer"])).result["reward"] == 1.0
    assert row["metadata"]["output"].keys() == {"tuple"}


def test_answer_at_which_the_scorer_fails_is_worth_nothing_and_counted():
    (row,) = rows_of("prime_factorization", size=1)
    reply = scored("prime_factorization", row, written("two"))  # it takes the factors to be whole numbers
    assert reply.result["reward"] == 0.0 and reply.result["metrics"]["scorer_failed"] == 1.0
    assert scored("prime_factorization", row, written(row["answer"])).result["metrics"]["scorer_failed"] == 0.0


def test_scorer_that_evaluates_what_the_model_wrote_is_stopped(monkeypatch):
    monkeypatch.setattr(adapter, "SCORING_SECONDS", 0.2)
    (row,) = rows_of("countdown", size=1)
    reply = scored("countdown", row, written("9**9**9"))
    assert reply.result["reward"] == 0.0 and reply.result["metrics"]["scorer_failed"] == 1.0
    assert scored("countdown", row, written(row["answer"])).result["reward"] == 1.0  # and the alarm is off again


def test_scorer_that_fails_at_the_right_answer_too_fails_the_trajectory():
    class Broken:
        def score_answer(self, answer, entry):
            raise KeyError("number")

    (row,) = rows_of("chain_sum", size=1)
    env = ReasoningGym("chain_sum")
    env._dataset = Broken()
    env.reset(row)
    with pytest.raises(KeyError, match="number"):
        env.on_turn(view_of(written(row["answer"])))


def test_composite_takes_its_parts_as_plain_values():
    parts = [{"name": "chain_sum", "weight": 1.0, "config": {}}, {"name": "leg_counting", "weight": 1.0, "config": {}}]
    rows = rows_of("composite", size=8, datasets=parts)
    assert {row["metadata"]["source_dataset"] for row in rows} == {"chain_sum", "leg_counting"}
    for row in rows[:3]:
        assert scored("composite", row, written(row["answer"]), datasets=parts).result["reward"] == 1.0


def test_probe_makes_the_rows():
    rows = rl.env_rows("reasoning_gym:chain_sum", {"size": 2}, seed=3)
    assert rows == rows_of("chain_sum", size=2)


@pytest.mark.parametrize(
    ("task", "arguments", "fault"),
    [
        ("chain_sums", {}, "reasoning_gym has no task 'chain_sums'. Did you mean chain_sum?"),
        ("chain_sum", {"min_term": 2}, "chain_sum has no option min_term. Did you mean min_terms?"),
        ("chain_sum", {"size": -1}, "reasoning_gym:chain_sum can't be made of .*size"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "can't be made of .*AssertionError"),
        ("composite", {}, "can't be made of .*AssertionError: Must specify at least one dataset"),
        ("chain_sum", {"instruction": 3}, "instruction of reasoning_gym:chain_sum is 3; it is a text"),
    ],
)
def test_what_is_no_task_or_option_is_named(task, arguments, fault):
    with pytest.raises((rl.ConfigError, rl.ConfigTypeError), match=fault):
        ReasoningGym(task, **arguments)


@pytest.mark.parametrize(
    ("env", "arguments", "fault"),
    [
        ("reasoning_gym", {}, "it names an environment of reasoning_gym, as reasoning_gym:chain_sum"),
        ("reasoning_gym:chain_sum", {"task": "gcd"}, "env_arguments names 'task' again"),
    ],
)
def test_name_of_a_task_is_part_of_the_environments(env, arguments, fault):
    with pytest.raises(rl.ConfigError, match=fault):
        EnvSource(env, arguments)


def test_row_of_other_data_is_refused():
    reply = scored("chain_sum", {"prompt": "2 + 2"}, "")
    assert "The row has no 'question', only 'prompt'; reasoning_gym:chain_sum brings rows of its own" in reply.error


def test_package_that_is_missing_is_named_with_its_extra(tmp_path):
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from pipeline.adapters.reasoning_gym import ReasoningGym\nReasoningGym('chain_sum')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ConfigError: reasoning_gym's tasks need the package reasoning-gym" in done.stderr
    assert done.stderr.strip().endswith("install the extra: pip install -e '.[tasks]' in the checkout.")


def test_turn_is_scored_only_once(monkeypatch):
    asked = []
    env = ReasoningGym("chain_sum")
    (row,) = rows_of("chain_sum", size=1)
    env.reset(row)
    monkeypatch.setattr(env, "_scored", lambda answer: (asked.append(answer), (0.5, False))[1])
    view = view_of(written(7))
    assert env.on_turn(view).done and env.reward(view, row) == 0.5 and asked == ["7"]


def test_new_instance_goes_on_from_the_snapshot():
    env, successor = ReasoningGym("rearc"), ReasoningGym("rearc")
    (row,) = rows_of("rearc", size=1)
    env.reset(row)
    successor.restore(msgpack.unpackb(msgpack.packb(env.snapshot()), strict_map_key=False))
    view = view_of(written(row["answer"]))
    assert successor.on_turn(view).done and successor.reward(view, row) == 1.0


def view_of(text):
    view = rl.TrajectoryView(0, 0, [])
    view.turns.append(rl.Turn(text, (), 3, True))
    return view
