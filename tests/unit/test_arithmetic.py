"""The arithmetic task: its problems, its rows, and its grading in both languages."""

from collections import Counter
from statistics import mean

import pytest
from played_tasks import play

from pipeline.errors import ConfigError
from pipeline.tasks import TASKS, arithmetic
from pipeline.tasks.arithmetic import NUMBERS, Arithmetic
from pipeline.user_code.load import load_env_class

CHAT = arithmetic.chat_format()
ROW = {"expression": "4 + 1 - 2 + 2", "answer": 5}


def score(turn, row=ROW, language="tiny"):
    chat = CHAT if language == "tiny" else None
    _, reply = play(lambda: Arithmetic(language), row, [turn], chat)
    assert reply.result["messages"] is None, "one turn is all"
    return reply.result["reward"]


def test_the_tiny_model_reads_words_and_a_text_model_a_question():
    (reply,) = play(lambda: Arithmetic("tiny"), ROW, [])
    ids = CHAT.render_prompt(reply.result["messages"], [])
    assert CHAT.decode(ids) == "<start> 4 +1 -2 +2 ="
    (reply,) = play(Arithmetic, ROW, [])
    assert reply.result["messages"][-1] == {"role": "user", "content": "What is 4 + 1 - 2 + 2?"}
    assert reply.result["tools"] == []


@pytest.mark.parametrize(("turn", "reward"), [("5", 1.0), ("4", 0.0), ("+2", 0.0), ("=", 0.0), ("", 0.0)])
def test_one_word_of_the_tiny_model_is_graded_exactly(turn, reward):
    assert score(turn) == reward


@pytest.mark.parametrize(
    ("turn", "reward"),
    [
        ("The answer is 5.", 1.0),
        ("4 + 1 - 2 + 2 = 5", 1.0),
        ("<think>It is 4.</think>5", 1.0),
        ("The answer is 5.5", 0.0),
        ("The answer is 4 + 1 = 5, no, 3 then.", 1.0),  # the number behind the equals sign
        ("It has 5 in it, so the answer is 4.", 0.0),
        ("five", 0.0),
        ("", 0.0),
    ],
)
def test_the_answer_of_a_text_is_graded_exactly(turn, reward):
    assert score(turn, language="text") == reward


@pytest.mark.parametrize("language", ["tiny", "text"])
def test_a_perfect_player_gets_everything_and_a_blind_one_little(language):
    rows = arithmetic.holdout_rows()
    assert mean(score(str(row["answer"]), row, language) for row in rows) == 1.0
    assert max(mean(score(number, row, language) for row in rows) for number in NUMBERS) <= 0.2


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_problems_are_in_no_training_set(seed):
    train, held_out = arithmetic.train_rows(seed), arithmetic.holdout_rows()
    assert len(held_out) == len({row["expression"] for row in held_out}) == 64
    assert not {row["expression"] for row in held_out} & {row["expression"] for row in train}
    assert {row["answer"] for row in train} == {row["answer"] for row in held_out} == set(range(8))


def test_training_rows_are_balanced_and_follow_the_seed():
    rows = arithmetic.train_rows(4)
    assert rows == arithmetic.train_rows(4) and rows != arithmetic.train_rows(5)
    first_round = Counter(row["expression"] for row in rows[:248])
    assert set(first_round.values()) == {1} and first_round.keys() == {row["expression"] for row in rows}
    assert all(row["answer"] == eval(row["expression"]) for row in rows[:248])  # the oracle; the text is the task's own


def test_held_out_rows_stay_the_same():
    """Evaluations of different versions are compared with each other."""
    rows = arithmetic.holdout_rows()
    assert rows == arithmetic.holdout_rows()
    assert sum(row["answer"] * index for index, row in enumerate(rows)) == 6784


def test_the_vocabulary_is_small_and_every_word_ends_a_turn():
    assert CHAT.vocab_size <= 64
    assert len(CHAT.stop_ids) == len(arithmetic.WORDS)


def test_the_registry_leads_to_the_environment_class():
    task = TASKS["arithmetic"]
    assert load_env_class(task.environment) is Arithmetic
    assert task.speaks == ("tiny", "text") and task.options == {}
    for language in task.speaks:
        assert task.arguments_in(language) == {"language": language}


def test_another_language_is_refused():
    with pytest.raises(ConfigError, match='must be "text" or "tiny"'):
        Arithmetic("latin")
