"""What follows a turn: found by comparing two renderings, encoded alone, appended to the ids as they were sampled."""

import pytest
from chat_models import ADD, FAMILIES, sampled, turn_of, write_chat_model

from pipeline.chat.format import assistant_message
from pipeline.chat.model_chat import load_chat

USER = {"role": "user", "content": "What is 1 + 2?"}
MORE = {"role": "user", "content": "And 2 + 3?"}
CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "qwen3": '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "smollm3": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3_1": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "smollm2": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',  # as it is told to
}


def result(content, number=1):
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05d}", "content": content}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """family -> its chat format"""
    made = {}
    for family in FAMILIES:
        made[family] = load_chat(write_chat_model(tmp_path_factory.mktemp(family), family))
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_appended_ids_are_those_of_the_whole_conversation_rendered_at_once(chats, family):
    chat = chats[family]
    end = FAMILIES[family][3]
    prompt = chat.render_prompt([USER], [ADD] if family != "mistral" else [])
    answer = sampled(chat, ("It is 3." if family != "mistral" else " It is 3.") + end)
    turn = turn_of(chat, answer)
    assert (turn.text.strip(), turn.tool_calls) == ("It is 3.", [])
    reply = chat.render_reply([USER], turn, [MORE], [ADD] if family != "mistral" else [])
    whole = chat.render_prompt([USER, assistant_message(turn.text, []), MORE], [ADD] if family != "mistral" else [])
    assert not reply.rewrites
    assert [*prompt, *answer, *reply.tokens] == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_result_follows_its_call(chats, family):
    chat = chats[family]
    turn = turn_of(chat, sampled(chat, CALLS[family] + FAMILIES[family][3]))
    assert [(call["name"], call["arguments"]) for call in turn.tool_calls] == [("add", {"a": 1, "b": 2})]
    reply = chat.render_reply([USER], turn, [result("three")], [ADD])
    assert not reply.rewrites
    assert "three" in chat.decode(reply.tokens) and "add" not in chat.decode(reply.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_cut_at_its_cap_gets_its_end_from_the_template(chats, family):
    chat = chats[family]
    ended = turn_of(chat, sampled(chat, " It is" + FAMILIES[family][3]))
    cut = turn_of(chat, sampled(chat, " It is"))
    with_end, without = (chat.render_reply([USER], turn, [MORE], []).tokens for turn in (cut, ended))
    assert with_end == [ended.ids[-1], *without]
