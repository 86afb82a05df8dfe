"""The tiny chat format: ids out of messages, text and calls out of ids."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline.chat import tiny
from pipeline.chat.format import ModelTurn, cut_text
from pipeline.chat.tiny import END, MODEL, START, TerseChat, TinyChat
from pipeline.errors import ConfigError


def find_calls(words):
    return [{"name": "say", "arguments": {"word": word}, "error": None} for word in words]


@pytest.fixture
def chat():
    return TinyChat(["up", "down", "go:"], find_calls)


def user(text):
    return {"role": "user", "content": text}


def reply_of(chat, messages, turn_ids):
    return chat.render_reply([], ModelTurn(turn_ids, "", []), messages, []).tokens


def test_prompt_holds_markers_and_words_up_to_where_the_model_writes(chat):
    ids = chat.render_prompt([{"role": "system", "content": "go: up"}, user("down")], [])
    assert chat.decode(ids) == f"<system> go: up <user> down {MODEL}"


def test_an_earlier_turn_of_the_model_in_a_prompt_is_closed(chat):
    ids = chat.render_prompt([user("go:"), {"role": "assistant", "content": "up"}, user("down")], [])
    assert chat.decode(ids) == f"<user> go: {MODEL} up {END} <user> down {MODEL}"


def test_every_id_lies_in_the_vocabulary_and_ids_are_distinct(chat):
    ids = [chat.render_prompt([user(word)], [])[1] for word in ("up", "down", "go:")]
    assert len(set(ids)) == 3 and all(0 <= index < chat.vocab_size for index in ids)
    assert all(0 <= index < chat.vocab_size for index in chat.stop_ids)


def test_reply_follows_a_turn_that_ended_itself(chat):
    up = chat.render_prompt([user("up")], [])[1]
    ids = reply_of(chat, [{"role": "tool", "name": "say", "content": "down"}], [up, *chat.stop_ids])
    assert chat.decode(ids) == f"<tool> down {MODEL}"


def test_reply_closes_a_turn_that_was_cut(chat):
    up = chat.render_prompt([user("up")], [])[1]
    reply = [{"role": "tool", "name": "say", "content": "down"}]
    assert chat.decode(reply_of(chat, reply, [up])) == f"{END} <tool> down {MODEL}"
    assert chat.decode(reply_of(chat, reply, [])) == f"{END} <tool> down {MODEL}"


def test_turn_and_reply_read_like_the_same_conversation_rendered_at_once(chat):
    """What is appended piece by piece is what one rendering of all messages gives."""
    up = chat.render_prompt([user("up")], [])[1]
    turn = [up, *chat.stop_ids]
    pieces = chat.render_prompt([user("go:")], []) + turn + reply_of(chat, [user("down")], turn)
    assert pieces == chat.render_prompt([user("go:"), {"role": "assistant", "content": "up"}, user("down")], [])


def test_turn_is_read_without_its_end_token(chat):
    up, down = (chat.render_prompt([user(word)], [])[1] for word in ("up", "down"))
    text, calls = chat.parse_turn([up, down, *chat.stop_ids])
    assert text == "up down" and [call["arguments"]["word"] for call in calls] == ["up", "down"]
    assert chat.parse_turn([up]).text == "up"
    assert chat.parse_turn(list(chat.stop_ids)) == ("", [])


def test_a_word_outside_the_vocabulary_is_named(chat):
    with pytest.raises(ConfigError, match="The word 'sideways' of 'up sideways' is not among the 9 words"):
        chat.render_prompt([user("up sideways")], [])
    with pytest.raises(ConfigError, match="The word 'sideways' is not among the 9 words"):
        chat.render_prompt([user("sideways")], [])


def test_a_word_outside_the_vocabulary_is_named_with_its_text_for_it_may_be_what_a_tool_raised(chat):
    with pytest.raises(ConfigError, match="The word 'error:' of 'error: ValueError: boom' is not among"):
        chat.cut("error: ValueError: boom", 100, already=False)


def test_repeated_words_are_refused():
    with pytest.raises(ConfigError, match="up more than once"):
        TinyChat(["up", "down", "up"], find_calls)
    with pytest.raises(ConfigError, match="<user> more than once"):
        TinyChat(["<user>"], find_calls)


def test_a_rendered_list_is_the_callers_own(chat):
    first = chat.render_prompt([user("up")], [])
    expected = list(first)
    first.append(99)
    assert chat.render_prompt([user("up")], []) == expected


def test_what_is_remembered_stays_bounded(chat, monkeypatch):
    monkeypatch.setattr(tiny, "MAX_REMEMBERED", 2)
    texts = ["up", "down", "go:", "up up", "up down", "up"]
    for text in texts:
        assert chat.decode(chat.render_prompt([user(text)], [])) == f"<user> {text} {MODEL}"
        ids = chat.render_prompt([user(text)], [])[1:-1]
        assert chat.parse_turn(ids).text == text
    assert len(chat._messages) <= 2 and len(chat._turns) <= 2


def test_terse_format_has_no_markup_and_stops_at_its_stop_words():
    chat = TerseChat(["find", "low", "1", "2"], stop_words=["1", "2"], find_calls=find_calls)
    prompt = chat.render_prompt([user("find")], [])
    turn = reply_of(chat, [user("2")], [])
    assert set(turn) < set(chat.stop_ids) and len(chat.stop_ids) == 2
    reply = reply_of(chat, [{"role": "tool", "name": "say", "content": "low"}], turn)
    assert chat.decode(prompt + turn + reply) == f"{START} find 2 low"
    assert chat.parse_turn(turn) == ("2", [{"name": "say", "arguments": {"word": "2"}, "error": None}])
    assert chat.vocab_size == 5


def test_a_long_tool_result_is_cut_and_marked(chat):
    assert chat.cut("up down up", 3, False) == "up down up"
    assert chat.cut("up down up", 2, False) == "up down <cut>"
    assert chat.cut("up", 3, True) == "up <cut>"  # something was lost on the way here
    assert chat.decode(reply_of(chat, [{"role": "tool", "content": chat.cut("up up", 1, False)}], [])) == (
        "<end> <tool> up <cut> <model>"
    )


def test_a_terse_format_marks_a_cut_with_its_own_word_or_not_at_all():
    assert TerseChat(["1", "what"], stop_words=["1"], cut_word="what").cut("1 1", 1, False) == "1 what"
    chat = TerseChat(["1"], stop_words=["1"])
    assert chat.cut("1 1", 2, False) == "1 1"
    with pytest.raises(ConfigError, match="no word that says so"):
        chat.cut("1 1", 1, False)


@pytest.mark.parametrize(
    ("tokens", "kept"), [(1, "a"), (2, "a"), (3, "aé"), (4, "aé"), (6, "aé"), (7, "aé😀"), (9, "aé😀b")]
)
def test_text_is_cut_between_characters(tokens, kept):
    """Bytes as tokens: a is one, é two, the face four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert cut_text(tokenizer, "aé😀b", tokens) == kept
