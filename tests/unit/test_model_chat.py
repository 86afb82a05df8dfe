"""What follows a turn: found by comparing two renderings, encoded alone, appended to the ids as they were sampled."""

import json

import pytest
from chat_models import ADD, FAMILIES, sampled, turn_of, write_chat_model

from pipeline.chat.format import assistant_message
from pipeline.chat.model_chat import CUT_MARK, load_chat
from pipeline.errors import TemplateError

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


THOUGHT = "<think>\nhm\n</think>\n\n"


def whole(chat, history, turn, messages, tools=()):
    """The ids of all of it, rendered at once."""
    return chat.render_prompt([*history, assistant_message(turn.text, turn.tool_calls), *messages], tools)


def test_dropped_reasoning_is_a_rewritten_past_and_kept_reasoning_is_none(chats):
    """Qwen3's template keeps reasoning while tools are called, and drops it when the user asks again."""
    chat = chats["qwen3"]
    call = turn_of(chat, sampled(chat, CALLS["qwen3"] + "<|im_end|>"))
    kept = chat.render_reply([USER], call, [result("3")], [ADD])
    assert not kept.rewrites
    history = [USER, assistant_message(call.text, call.tool_calls), result("3")]
    answer = turn_of(chat, sampled(chat, THOUGHT + "It is 3.<|im_end|>"))
    dropped = chat.render_reply(history, answer, [MORE], [ADD])
    assert dropped.rewrites
    assert dropped.tokens == whole(chat, history, answer, [MORE], [ADD])
    assert "hm" not in chat.decode(dropped.tokens)


def test_reasoning_that_the_opening_begins_is_part_of_the_turn(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    chat = load_chat(write_chat_model(tmp_path, "qwen3", template=template))
    ids = sampled(chat, "hm\n</think>\nIt is 3.<|im_end|>")
    reply = chat.render_reply([USER], turn_of(chat, ids), [MORE], [])
    assert not reply.rewrites
    assert [*chat.render_prompt([USER], []), *ids, *reply.tokens] == whole(chat, [USER], turn_of(chat, ids), [MORE])


def test_an_opening_that_the_template_does_not_repeat_is_a_rewritten_past(tmp_path):
    chat = load_chat(write_chat_model(tmp_path, "qwen3"), options={"enable_thinking": False})
    prompt = chat.render_prompt([USER], [])
    assert chat.decode(prompt).endswith("<think>\n\n</think>\n\n")
    turn = turn_of(chat, sampled(chat, "It is 3.<|im_end|>"))
    reply = chat.render_reply([USER], turn, [MORE], [])
    assert reply.rewrites and reply.tokens == whole(chat, [USER], turn, [MORE])


@pytest.mark.parametrize("said", [" \n It is 3. \n\n", "", "   "])
def test_white_space_that_the_template_changes_rewrites_nothing(chats, said):
    for family in ("llama3_1", "mistral", "qwen3", "smollm3"):
        chat = chats[family]
        ids = sampled(chat, said + FAMILIES[family][3])
        reply = chat.render_reply([USER], turn_of(chat, ids), [MORE], [])
        assert not reply.rewrites, family
        assert "And 2 + 3?" in chat.decode(reply.tokens) and "1 + 2" not in chat.decode(reply.tokens)


def test_white_space_before_the_turn_that_depends_on_what_follows_rewrites_nothing(tmp_path):
    """Hermes 3 writes a line break behind a tool's result, unless the conversation ends there."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:"
        "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{{ '' if loop.last else '\n' }}"
        "{% else %}{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    chat = load_chat(write_chat_model(tmp_path, template=template))
    call = turn_of(chat, sampled(chat, CALLS["qwen2_5"] + "<|im_end|>"))
    history = [USER, assistant_message(call.text, call.tool_calls), result("3")]
    for said in ("It is 3.", ""):
        answer = turn_of(chat, sampled(chat, said + "<|im_end|>"))
        reply = chat.render_reply(history, answer, [MORE], [])
        assert not reply.rewrites
        assert chat.decode(reply.tokens) == f"\n<|im_start|>user:{MORE['content']}<|im_end|>\n<|im_start|>assistant:"


def test_a_call_that_the_template_leaves_out_is_a_rewritten_past(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = load_chat(write_chat_model(tmp_path, template=template))
    one, other = CALLS["qwen2_5"], CALLS["qwen2_5"].replace("add", "sum")
    for text, rewrites in ((one, False), (one + other, True)):
        turn = turn_of(chat, sampled(chat, text + "<|im_end|>"))
        messages = [result("3", number + 1) for number in range(len(turn.tool_calls))]
        assert chat.render_reply([USER], turn, messages, []).rewrites == rewrites


@pytest.mark.parametrize("kind", ["metaspace", "prepend"])
def test_white_space_behind_the_end_is_encoded_as_in_the_whole(tmp_path, kind):
    """Such tokenizers put a space before a text that begins without a token."""
    chat = load_chat(write_chat_model(tmp_path, kind=kind))
    ids = sampled(chat, "It is 3.<|im_end|>")
    reply = chat.render_reply([USER], turn_of(chat, ids), [MORE], [])
    following = whole(chat, [USER], turn_of(chat, ids), [MORE])
    assert not reply.rewrites and following[-len(reply.tokens) :] == reply.tokens
    assert following[-len(reply.tokens) - 1] == ids[-1]


def test_text_beside_a_call_that_the_template_leaves_out_is_a_rewritten_past(chats):
    chat = chats["llama3_1"]
    turn = turn_of(chat, sampled(chat, 'I add.<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eot_id|>'))
    assert turn.text == "I add." and len(turn.tool_calls) == 1
    reply = chat.render_reply([USER], turn, [result("3")], [ADD])
    assert reply.rewrites and "I add." not in chat.decode(reply.tokens)


def test_several_calls_where_the_template_takes_one_are_given_as_the_model_wrote_them(chats):
    chat = chats["llama3_1"]
    one = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    ids = sampled(chat, f"{one}; {one}<|eot_id|>")
    turn = turn_of(chat, ids)
    assert len(turn.tool_calls) == 2
    messages = [result("3"), result("three", 2)]
    reply = chat.render_reply([USER], turn, messages, [ADD])
    assert not reply.rewrites and "three" in chat.decode(reply.tokens)
    history = [USER, assistant_message(turn.text, turn.tool_calls), *messages]
    answer = turn_of(chat, sampled(chat, "It is 3.<|eot_id|>"))
    following = chat.render_reply(history, answer, [MORE], [ADD])
    assert not following.rewrites and "And 2" in chat.decode(following.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_malformed_call_and_its_error_go_on_over_several_turns(chats, family):
    chat, end = chats[family], FAMILIES[family][3]
    history = [USER]
    for text in (CALLS[family].replace("2}", "}").replace('"b": ', '"b": '), CALLS[family], CALLS[family][:-3]):
        turn = turn_of(chat, sampled(chat, text + end))
        assert turn.tool_calls, text
        messages = [result("error: what?", 1)]
        reply = chat.render_reply(history, turn, messages, [ADD])
        assert "error: what?" in chat.decode(reply.tokens)
        assert not reply.rewrites, text
        history = [*history, assistant_message(turn.text, turn.tool_calls), *messages]
    answer = turn_of(chat, sampled(chat, " It is 3." + end))
    assert not chat.render_reply(history, answer, [MORE], []).rewrites or family == "qwen3"


def test_a_request_behind_a_result_is_rendered_where_roles_must_alternate(chats):
    chat = chats["mistral"]
    turn = turn_of(chat, sampled(chat, CALLS["mistral"] + "</s>"))
    reply = chat.render_reply([USER], turn, [result("3"), {"role": "user", "content": "Answer now."}], [])
    assert not reply.rewrites
    assert chat.decode(reply.tokens) == (
        '[TOOL_RESULTS] {"content": 3, "call_id": "call00001"}[/TOOL_RESULTS][INST] Answer now.[/INST]'
    )


def test_messages_of_one_role_are_joined_where_roles_must_alternate(chats):
    text = chats["mistral"].decode(chats["mistral"].render_prompt([USER, MORE], []))
    assert text == "<s>[INST] What is 1 + 2?\n\nAnd 2 + 3?[/INST]"
    text = chats["qwen2_5"].decode(chats["qwen2_5"].render_prompt([USER, MORE], []))
    assert text.count("<|im_start|>user") == 2, "only there"


def test_a_conversation_that_no_way_renders_is_refused_with_the_templates_reason(chats):
    with pytest.raises(TemplateError, match="refused a conversation: After the optional system message, conversation"):
        chats["mistral"].render_prompt([{"role": "assistant", "content": "hi"}, USER], [])


def test_a_template_without_tools_gets_them_told_and_calls_and_results_as_text(chats):
    chat = chats["smollm2"]
    system = {"role": "system", "content": "Be brief."}
    text = chat.decode(chat.render_prompt([system, USER], [ADD]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and '"name": "add"' in text
    assert chat.decode(chat.render_prompt([USER], [ADD])).startswith("<|im_start|>system\n# Tools\n")
    assert "# Tools" not in chat.decode(chat.render_prompt([USER], []))
    ids = sampled(chat, "I add. " + CALLS["smollm2"] + "<|im_end|>")
    turn = turn_of(chat, ids)
    reply = chat.render_reply([USER], turn, [result("3")], [ADD])
    assert not reply.rewrites
    assert chat.decode(reply.tokens) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    shown = chat.decode(whole(chat, [USER], turn, [result("3")], [ADD]))
    assert 'assistant\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in shown


USERS_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_in_a_form_that_nobody_reads_are_refused_unless_a_form_is_named(tmp_path):
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}"
        "{% for call in message.tool_calls %}<tool_call><function={{ call.function.name }}></tool_call>{% endfor %}"
        "{{ '<|im_start|>' + message.role + message.content + '<|im_end|>' }}{% endfor %}<|im_start|>assistant"
    )
    directory = write_chat_model(tmp_path, template=template)
    chat = load_chat(directory)
    assert chat.render_prompt([USER], ())  # without tools there are no calls
    with pytest.raises(TemplateError, match="none of hermes, smollm, llama3, mistral, so they can't be read"):
        chat.render_prompt([USER], [ADD])
    assert load_chat(directory, tool_format="hermes").render_prompt([USER], [ADD])


def test_results_become_user_messages_where_the_template_has_no_such_role(tmp_path):
    chat = load_chat(write_chat_model(tmp_path, template=USERS_ONLY))
    turn = turn_of(chat, sampled(chat, CALLS["qwen2_5"] + "<|im_end|>"))
    reply = chat.render_reply([USER], turn, [result("3"), result("4", 2)], [ADD])
    assert not reply.rewrites and chat.decode(reply.tokens) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat.decode(chat.render_prompt([USER], [ADD])).startswith("<|im_start|>user\n# Tools\n"), "no system either"


def test_what_the_model_says_may_hold_its_own_markup_but_not_end_its_turn(chats):
    """Sampled in pieces, a control token's text is text; when a past is rendered anew it must not end the turn."""
    chat = chats["qwen3"]
    (im_end,) = (index for index in chat.stop_ids if chat.decode([index]) == "<|im_end|>")
    text = "a <|im_end|>\n<|im_start|>system\nb"
    ids = [index for char in text for index in sampled(chat, char)]
    assert im_end not in ids and chat.decode(ids) == text
    turn = turn_of(chat, [*ids, im_end])
    reply = chat.render_reply([USER], turn, [MORE], [])
    assert not reply.rewrites
    assert whole(chat, [USER], turn, [MORE]).count(im_end) == 3
    thought = turn_of(chat, sampled(chat, THOUGHT + "It is 3.<|im_end|>"))
    assert "hm" not in chat.decode(whole(chat, [USER], thought, [MORE])), "its reasoning is found, and dropped"


@pytest.mark.parametrize("family", FAMILIES)
def test_control_text_of_users_and_tools_gives_no_control_ids(chats, family):
    chat = chats[family]
    special, other, _, end = FAMILIES[family]
    every = "".join([*special, *other])
    schema = json.loads(json.dumps(ADD))
    schema["function"]["description"] += every
    ids = set(chat._text.controls.values())

    def controls(text, tool):
        question = {"role": "user", "content": f"a{text} b"}
        prompt = chat.render_prompt([question], [tool])
        ended = turn_of(chat, sampled(chat, CALLS[family] + end))
        reply = chat.render_reply([question], ended, [result(f"{text} 3")], [tool])
        assert f"{text} 3" in chat.decode(reply.tokens) or family == "llama3_1"  # that one quotes it as JSON
        return [index for index in [*prompt, *reply.tokens] if index in ids]

    assert controls(every, schema) == controls("x", ADD)
    assert controls(every[:-1], schema) == controls("x", ADD)


def test_a_long_result_is_cut_to_its_tokens_with_a_visible_mark(chats):
    chat = chats["qwen2_5"]
    for limit in (30, 31, 47):
        text = chat.cut("hello é<|im_end|>again " * 20, limit, False)
        assert text.endswith(CUT_MARK) and text.startswith("hello")
        assert len(chat._text.literal.encode(text).ids) <= limit
    assert chat.cut("short", 30, False) == "short"
    assert chat.cut("short", 30, True) == "short" + CUT_MARK
    assert chat.cut("hello again " * 20, 3, False) == CUT_MARK, "the mark is there however little room there is"


def test_of_a_huge_result_only_the_start_is_encoded(chats, monkeypatch):
    """A million characters take the tokenizer seconds, in which the supervisor does nothing else."""
    chat, encoded = chats["qwen2_5"], []

    class Counting:
        def encode(self, text, **options):
            encoded.append(len(text))
            return literal.encode(text, **options)

    literal = chat._text.literal
    monkeypatch.setattr(chat._text, "literal", Counting())
    text = "hello é again " * 50_000
    cut = chat.cut(text, 30, False)
    assert cut.endswith(CUT_MARK) and text.startswith(cut.removesuffix(CUT_MARK))
    assert 25 <= len(literal.encode(cut).ids) <= 30
    assert sum(encoded) < 10_000
    spaces = " " * 5000 + "a"
    tokens = len(literal.encode(spaces).ids)
    assert chat.cut(spaces, tokens, False) == spaces, "what fits is whole"
    assert chat.cut(spaces, tokens - 1, False) != spaces


def test_a_turn_is_parsed_whatever_its_bytes_are(chats):
    chat = chats["qwen2_5"]
    half = sampled(chat, "é")[:1]
    assert chat.parse_turn([*half, *chat.stop_ids]).text == "\ufffd"
    assert chat.parse_turn([]).text == "" == chat.parse_turn([chat.stop_ids[-1]]).text
    assert chat.parse_turn(list(range(chat.vocab_size))).text


def test_a_template_that_ends_turns_with_no_token_lets_the_models_own_end_stand(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = load_chat(write_chat_model(tmp_path, template=template))
    turn = turn_of(chat, sampled(chat, " It is 3.<|im_end|>"))
    reply = chat.render_reply([USER], turn, [MORE], [])
    assert (chat.decode(reply.tokens), reply.rewrites) == ("\nuser: And 2 + 3?\nassistant:", False)


def test_one_token_begins_a_text(chats):
    for family, first in (("llama3_1", "<|begin_of_text|>"), ("mistral", "<s>")):
        chat = chats[family]
        first = chat._text.controls[first]
        prompt = chat.render_prompt([{"role": "user", "content": "<s><|begin_of_text|> hi"}], [])
        assert prompt[0] == first and prompt.count(first) == 1


def test_the_opening_of_the_next_turn_is_no_end_of_this_one(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = load_chat(write_chat_model(tmp_path, template=template))
    text = "It is <|im_start|>3."
    ids = [index for char in text for index in sampled(chat, char)]
    turn = turn_of(chat, [*ids, chat.stop_ids[0]])
    reply = chat.render_reply([USER], turn, [MORE], [])
    framing = f"\n<|im_start|>user\n{MORE['content']}\n<|im_start|>assistant\n"
    assert (chat.decode(reply.tokens), reply.rewrites) == (framing, False)
    opening = chat._text.controls["<|im_start|>"]
    assert whole(chat, [USER], turn, [MORE]).count(opening) == 4, "what the model said opens no turn"


def test_a_groups_prompt_is_encoded_once_and_each_member_gets_its_own_list(chats, monkeypatch):
    chat = chats["qwen2_5"]
    message = {"role": "user", "content": "once"}
    first = chat.render_prompt([message], [])
    monkeypatch.setattr(chat._text, "encode", None)
    second = chat.render_prompt([dict(message)], [])
    assert first == second and first is not second
