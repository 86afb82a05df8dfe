"""The search task: its worlds, its tool, its rows, and its rewards in both languages."""

from collections import Counter
from statistics import mean

import pytest
from played_tasks import call, play, told

from pipeline.env import as_messages
from pipeline.errors import ConfigError
from pipeline.tasks import TASKS, search, search_world
from pipeline.tasks.search import EXAMPLES, TINY_NAMES, Search, final_name, question_of
from pipeline.tasks.search_world import NAMES, RELATIONS, make_world
from pipeline.user_code.load import load_env_class

CHAT = search.chat_format()
ROW = {"world": 7, "hops": 2}


def tiny(turns, row=ROW, **arguments):
    return play(lambda: Search("tiny", **arguments), row, turns, CHAT)


def text(turns, row=ROW, **arguments):
    return play(lambda: Search("text", **arguments), row, turns)


def chain_of(row, language="tiny"):
    names, relations = (TINY_NAMES, ("boss",)) if language == "tiny" else (NAMES, RELATIONS)
    return make_world(row["world"], row["hops"], names, relations).chain


def look_up(person):
    return [call("search", query=person)]


def test_the_tiny_model_walks_from_name_to_name_and_its_last_turn_is_the_answer():
    first, second, third = chain_of(ROW)
    replies = tiny([first, second, third])
    assert CHAT.decode(CHAT.render_prompt(replies[0].result["messages"], [])) == f"<start> boss boss {first}"
    assert [told(reply) for reply in replies[1:3]] == [[second], [third]]
    assert replies[3].result == {"messages": None, "reward": 1.0}


def test_a_text_model_reads_sentences_and_answers_in_one():
    first, second, third = chain_of(ROW, "text")
    replies = text([look_up(first), look_up(second), f"The answer is {third}."])
    messages = as_messages(replies[0].result["messages"], "reset")
    assert messages[-1]["content"] == question_of(make_world(7, 2, NAMES, RELATIONS))
    (schema,) = replies[0].result["tools"]
    assert schema["function"]["name"] == "search" and schema["function"]["parameters"]["required"] == ["query"]
    for reply, subject, found in zip(replies[1:], (first, second), (second, third), strict=False):
        (sentences,) = told(reply)
        assert sentences.count(f"{subject}'s ") == len(RELATIONS) and f" is {found}." in sentences
    assert replies[3].result == {"messages": None, "reward": 1.0}


def test_the_question_names_the_relations_from_the_last_to_the_first():
    world = make_world(11, 3, NAMES, RELATIONS)
    first, second, third = world.asked
    assert question_of(world) == f"Who is the {third} of the {second} of {world.chain[0]}'s {first}?"
    asked = world.facts[world.facts[world.facts[world.chain[0], first], second], third]
    assert asked == world.chain[-1] and len(set(world.chain)) == 4


def test_the_examples_search_and_answer_right():
    for hops, world in zip((2, 3), search_world.EXAMPLE_WORLDS, strict=True):
        chain = make_world(world, hops, NAMES, RELATIONS).chain
        mine = EXAMPLES[: 2 * hops + 2] if hops == 2 else EXAMPLES[6:]
        assert mine[0]["content"].startswith("Who is ") and f" {chain[0]}'s " in mine[0]["content"]
        called = [message["tool_calls"][0]["function"]["arguments"]["query"] for message in mine[1:-1:2]]
        assert called == list(chain[:-1])
        assert all(f" is {found}." in message["content"] for message, found in zip(mine[2::2], chain[1:], strict=True))
        assert mine[-1]["content"] == f"The answer is {chain[-1]}."


def test_following_the_chain_is_worth_a_little_and_the_answer_alone_everything():
    first, second, third = chain_of(ROW)
    other = next(name for name in TINY_NAMES if name not in (first, second, third))
    scores = {
        turns: tiny(turns)[-1].result["reward"]
        for turns in [
            (other, other, third),
            (first, second, other),
            (first, other, other),
            (other, second, other),
            (other,) * 3,
        ]
    }
    assert list(scores.values()) == [1.0, search.CHAIN_CREDIT, search.CHAIN_CREDIT / 2, 0.0, 0.0]
    assert tiny((first, second, other), chain_credit=0)[-1].result["reward"] == 0.0


@pytest.mark.parametrize("word", ["boss", "what", "error:"])
def test_a_word_that_is_no_name_is_answered_and_costs_a_look_up(word):
    first, second, third = chain_of(ROW)
    replies = tiny([word, first, second])
    assert told(replies[1]) == ["error: what"] and [record.error for record in replies[1].tools] == ["what"]
    assert told(replies[2]) == [second]
    assert replies[3].result == {"messages": None, "reward": search.CHAIN_CREDIT / 2}
    assert tiny([first, second, word])[-1].result == {"messages": None, "reward": search.CHAIN_CREDIT}


@pytest.mark.parametrize("query", ["nonsense", "", "boss", "\ud83d\ude00", "Ann"])
def test_a_query_outside_the_tiny_words_is_answered_within_them(query):
    """As another model of that language might call: `play` renders each reply."""
    assert told(tiny([look_up(query)])[1]) == ["error: what"]


@pytest.mark.parametrize("query", ["the weather", "", "Annabel", "x" * 10_000])
def test_a_query_without_a_name_is_told_to_the_model_in_one_sentence(query):
    (sentence,) = told(text([look_up(query)])[1])
    assert sentence == "error: the directory has nothing about that; search for the name of a person"


def test_a_search_tells_of_few_people_however_many_it_names():
    (sentences,) = told(text([look_up("Ann's boss, ann, BEN? " + " ".join(NAMES))])[1])
    assert [sentences.count(f"{name}'s ") for name in NAMES[:4]] == [4, 4, 4, 0]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("The answer is Eve.", "Eve"),
        ("The answer is **eve**, Ben's boss.", "Eve"),
        ("The answer is Ann. No, the answer is: Ben", "Ben"),
        ("Ann's boss is Eve", "Eve"),
        ("Evelyn", None),
        ("The answer is nobody. Eve?", "Eve"),
        ("Ann, so the answer is unknown", None),
        ("", None),
    ],
)
def test_whom_a_text_gives_as_its_answer(said, name):
    assert final_name(said) == name


def test_what_the_model_thinks_is_no_answer():
    right = chain_of(ROW, "text")[-1]
    assert text([f"<think>The answer is {right}.</think>"])[-1].result["reward"] == 0.0
    assert text([f"<think>Ann? Ben?</think>{right}"])[-1].result["reward"] == 1.0


@pytest.mark.parametrize("language", ["tiny", "text"])
def test_a_perfect_player_gets_everything_and_a_blind_one_little(language):
    def perfect(row):
        chain = chain_of(row, language)
        turns = [*chain] if language == "tiny" else [*map(look_up, chain[:-1]), chain[-1]]
        return (tiny if language == "tiny" else text)(turns, row)[-1].result["reward"]

    def blind(row):
        said = ["ann"] * 4 if language == "tiny" else ["The answer is Ann."]
        return (tiny if language == "tiny" else text)(said, row)[-1].result["reward"]

    rows = search_world.holdout_rows()[:60]
    assert mean(map(perfect, rows)) == 1.0
    assert mean(map(blind, rows)) <= 0.2


def test_rows_follow_the_seed_and_no_world_is_trained_and_held_out():
    rows, held_out = search_world.train_rows(4), search_world.holdout_rows()
    assert rows == search_world.train_rows(4) and rows != search_world.train_rows(5)
    worlds, held = {row["world"] for row in rows}, {row["world"] for row in held_out}
    assert len(worlds) == len(rows) == 4096 and len(held) == len(held_out) == 256
    assert not held & (worlds | {*search_world.EXAMPLE_WORLDS})
    assert Counter(row["hops"] for row in rows) == {2: 2048, 3: 2048}
    assert Counter(row["hops"] for row in held_out) == {2: 128, 3: 128}


def test_held_out_worlds_stay_the_same():
    """Evaluations of different versions are compared with each other."""
    assert search_world.holdout_rows() == search_world.holdout_rows()
    assert (question_of(make_world(7, 2, NAMES, RELATIONS)), chain_of(ROW)) == (
        "Who is the neighbour of Pia's boss?",
        ("gus", "cleo", "finn"),
    )


def test_latency_delays_the_search():
    _, reply = tiny([chain_of(ROW)[0]], latency="fixed:20")
    assert reply.tools[0].seconds >= 0.019  # the loop's clock may be a resolution early


def test_the_registry_leads_to_the_environment_class():
    task = TASKS["search"]
    assert load_env_class(task.environment) is Search
    assert task.speaks == ("tiny", "text") and set(task.options) == {"latency"}
    for language in task.speaks:
        Search(**task.arguments_in(language))
    assert CHAT.vocab_size <= 64


@pytest.mark.parametrize("arguments", [{"language": "latin"}, {"chain_credit": 1.0}, {"latency": "fixed"}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ConfigError):
        Search(**arguments)


@pytest.mark.parametrize("hops", [0, 10, "2"])
def test_a_row_without_so_many_hops_fails_the_trajectory(hops):
    with pytest.raises(AssertionError, match="the row's hops are"):
        tiny([], {"world": 1, "hops": hops})
