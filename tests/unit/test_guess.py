"""The guess game: its rules, its rows, and its tiny format, played through the environment host."""

import asyncio
from collections import Counter

import pytest
from open_environments import num_episodes

from pipeline.chat.format import ModelTurn
from pipeline.chat.tiny import START
from pipeline.environments.host import EnvironmentHost
from pipeline.errors import ConfigError
from pipeline.tasks import TASKS, guess
from pipeline.tasks.guess import Guess
from pipeline.user_code.load import load_env_class
from workers.messages import EnvironmentCall

CHAT = guess.chat_format()


def reply_ids(messages, turn_ids=()):
    return CHAT.render_reply([], ModelTurn(turn_ids, "", []), messages, []).tokens


def ids_of(text):
    """Ids of a turn's words, as a model would emit them."""
    return reply_ids([{"role": "assistant", "content": text}])


def play(number, turns, **arguments):
    """Play `turns` (texts of the model) through format and host; returns the conversation's text and the last reply."""

    async def game():
        host = EnvironmentHost(lambda: Guess(**arguments), timeout=60.0, name="Guess")
        row = {"number": number, "seed": 0}
        reply = await host.handle(EnvironmentCall(0, 3, 1, "reset", {"row": row, "seed": 5}))
        assert reply.error is None, reply.error
        ids = CHAT.render_prompt(reply.result["messages"], reply.result["tools"])
        for text in turns:
            turn = ids_of(text)
            said, calls = CHAT.parse_turn(turn)
            argument = {
                "text": said,
                "tool_calls": calls,
                "num_tokens": len(turn),
                "stopped": bool(set(turn) & set(CHAT.stop_ids)),
            }
            reply = await host.handle(EnvironmentCall(1, 3, 1, "turn", argument))
            assert reply.error is None, reply.error
            ids += turn
            if reply.result["messages"] is None:
                break
            ids += reply_ids(reply.result["messages"], turn)
        assert num_episodes(host) == ("reward" not in reply.result)
        return CHAT.decode(ids), reply

    return asyncio.run(game())


def test_answers_say_where_the_secret_lies():
    text, reply = play(7, ["8", "4", "7"])
    assert text == f"{START} find 8 lower 4 higher 7"
    assert reply.result == {"messages": None, "reward": 1.0}


def test_the_last_guess_still_counts_and_the_next_never_comes():
    assert play(7, ["1", "2", "3", "4", "7"])[1].result == {"messages": None, "reward": 1.0}
    assert play(7, ["1", "2", "3", "4", "5", "7"])[1].result == {"messages": None, "reward": 0.0}
    assert play(7, ["1", "2", "7"], guesses=2)[1].result == {"messages": None, "reward": 0.0}


@pytest.mark.parametrize(("guesses", "expected"), [(4, 15.0), (5, 16.0)])
def test_binary_search_finds_as_many_as_it_can(guesses, expected):
    found = 0
    for number in range(1, 17):
        low, high, turns = 1, 16, []
        while low <= high:
            middle = (low + high) // 2
            turns.append(str(middle))
            if middle == number:
                break
            low, high = (low, middle - 1) if number < middle else (middle + 1, high)
        found += play(number, turns + ["1"] * 5, guesses=guesses)[1].result["reward"]
    assert found == expected


def test_a_turn_without_a_number_costs_a_guess_and_is_answered():
    text, reply = play(7, ["higher", "find", "lower", "7"])
    assert reply.result["reward"] == 1.0
    assert text.count("error: what") == 3
    assert play(7, ["", "", "", "", "", "7"])[1].result["reward"] == 0.0


def test_a_malformed_call_is_recorded_as_a_tool_error():
    _, reply = play(7, ["higher"])
    assert [(record.name, record.error) for record in reply.tools] == [("guess", "what")]


def test_the_first_number_word_of_a_turn_is_the_guess():
    assert CHAT.parse_turn(ids_of("higher 12 3")).tool_calls == [
        {"name": "guess", "arguments": {"number": 12}, "error": None}
    ]


def test_every_number_ends_a_turn_and_no_other_word_does():
    assert sorted(CHAT.stop_ids) == sorted(ids_of(" ".join(guess.NUMBERS)))
    assert not set(CHAT.stop_ids) & set(ids_of(" ".join((guess.PROMPT, *guess.ANSWERS))))


def test_all_messages_of_the_game_fit_the_tiny_vocabulary():
    assert CHAT.vocab_size <= 64
    for content in (*guess.ANSWERS, f"error: {guess.UNREADABLE}", guess.PROMPT):
        assert reply_ids([{"role": "tool", "content": content}]) != []


def test_latency_delays_the_answer():
    _, reply = play(7, ["8"], latency="fixed:20")
    assert reply.tools[0].seconds >= 0.019  # the loop's clock may be a resolution early


def test_every_number_occurs_in_training_and_among_the_held_out_and_no_seed_in_both():
    train, holdout = guess.train_rows(0), guess.holdout_rows()
    numbers = set(range(1, 17))
    assert {row["number"] for row in train} == numbers == {row["number"] for row in holdout}
    assert len(set(Counter(row["number"] for row in holdout).values())) == 1
    train_seeds, holdout_seeds = {row["seed"] for row in train}, {row["seed"] for row in holdout}
    assert len(train_seeds) == len(train) and len(holdout_seeds) == len(holdout)
    assert not train_seeds & holdout_seeds


def test_training_rows_are_balanced_and_follow_the_seed():
    rows = guess.train_rows(4)
    assert rows == guess.train_rows(4) and rows != guess.train_rows(5)
    for start in range(0, len(rows), 16):
        assert sorted(row["number"] for row in rows[start : start + 16]) == list(range(1, 17))


def test_a_row_outside_the_game_fails_the_trajectory():
    async def reset():
        host = EnvironmentHost(Guess, timeout=60.0, name="Guess")
        argument = {"row": {"number": 17, "seed": 0}, "seed": 5}
        return await host.handle(EnvironmentCall(0, 3, 1, "reset", argument))

    assert "the row's number is 17, outside 1 to 16" in asyncio.run(reset()).error


@pytest.mark.parametrize("arguments", [{"numbers": 0}, {"guesses": 2.0}, {"latency": "fixed"}])
def test_bad_sizes_and_latencies_are_refused(arguments):
    with pytest.raises(ConfigError):
        Guess(**arguments)


def test_the_registry_leads_to_the_environment_class():
    task = TASKS["guess"]
    assert load_env_class(task.environment) is Guess
    Guess(**task.arguments)
    assert set(task.options) == {"latency"} and task.speaks == ("tiny",)
