"""Chat templates render as transformers renders them; what is missing or wrong is told in one sentence."""

import json

import pytest
from chat_models import ADD, FAMILIES, write_chat_model

from pipeline.chat.model_chat import load_chat
from pipeline.chat.template import read_template, special_tokens
from pipeline.errors import ConfigError

SYSTEM = {"role": "system", "content": "Be brief. <b>é</b>"}
USER = {"role": "user", "content": "What is 1 + 2? "}
ARGUMENTS = {"a": 1, "é": '"<'}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"}
ANSWER = {"role": "assistant", "content": "It is 3."}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 3."}
MORE = {"role": "user", "content": "And 2 + 3?"}

CONVERSATIONS = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "answer": [USER, ANSWER],
    "second question": [SYSTEM, USER, ANSWER, MORE],
    "reasoning": [USER, THOUGHT],
    "earlier reasoning": [USER, THOUGHT, MORE],
    "call": [SYSTEM, USER, CALL],
    "result": [USER, CALL, RESULT],
    "all": [USER, CALL, RESULT, ANSWER, MORE],
}
PLAIN = ("question", "system", "answer", "second question")


def peer(directory):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_ids_are_those_of_transformers(tmp_path, family):
    write_chat_model(tmp_path, family)
    tokenizer, chat = peer(tmp_path), load_chat(tmp_path)
    template = read_template(tmp_path, {})
    compared = 0
    for name, messages in CONVERSATIONS.items():
        for tools in ([], [ADD]):
            for opens in (False, True):
                text = tokenizer.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=opens
                )
                assert template.render(messages, tools, opens) == text, (name, tools, opens)
                if opens and (family != "smollm2" or name in PLAIN and not tools):  # that one renders no tools
                    assert chat.render_prompt(messages, tools) == tokenizer.encode(text, add_special_tokens=False), name
                compared += 1
    assert compared == 4 * len(CONVERSATIONS)


PLAIN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TOOLS_TEMPLATE = "{{ bos_token }}tools: {{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}"


def both(directory, messages, tools):
    """(our text, transformers' text)"""
    theirs = peer(directory).apply_chat_template(messages, tools=tools or None, tokenize=False)
    return read_template(directory, {}).render(messages, tools, False), theirs


def test_templates_are_found_where_transformers_finds_them(tmp_path):
    write_chat_model(tmp_path, "llama3_1")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "default", "template": PLAIN_TEMPLATE}, {"name": "tool_use", "template": TOOLS_TEMPLATE}]
    begin, end = "<|begin_of_text|>", "<|eot_id|>"
    plain, tools = f"{begin}{USER['content']}{end}", f"{begin}tools: 1{USER['content']}"

    file = (tmp_path / "chat_template.jinja").read_text()
    path.write_text(json.dumps(config | {"chat_template": PLAIN_TEMPLATE}))
    ours, theirs = both(tmp_path, [USER], [])
    assert ours == theirs != plain and "<|start_header_id|>" in file, "the file goes first"

    (tmp_path / "chat_template.jinja").unlink()
    assert both(tmp_path, [USER], []) == (plain, plain)
    path.write_text(json.dumps(config | {"chat_template": named}))
    assert both(tmp_path, [USER], []) == (plain, plain)
    assert both(tmp_path, [USER], [ADD]) == (tools, tools)

    path.write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS_TEMPLATE)
    assert both(tmp_path, [USER], []) == (plain, plain)
    assert both(tmp_path, [USER], [ADD]) == (tools, tools)


@pytest.mark.parametrize("value", [3, [1], [{"name": "default"}], {"default": 1}])
def test_a_template_of_another_form_is_refused(tmp_path, value):
    write_chat_model(tmp_path, chat_template=value)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match='The "chat_template" in .*tokenizer_config.json is '):
        read_template(tmp_path, {})


def test_special_tokens_are_read_in_each_of_their_forms(tmp_path):
    write_chat_model(tmp_path, "llama3_1", bos_token={"content": "<|begin_of_text|>", "special": True})
    assert special_tokens(tmp_path) == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["bos_token"], config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    mapped = {"eos_token": "<|eot_id|>", "bos_token": {"content": "<|begin_of_text|>"}, "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    assert special_tokens(tmp_path) == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def test_added_tokens_that_only_the_config_names_are_control_tokens(tmp_path):
    write_chat_model(tmp_path, "qwen3")
    path = tmp_path / "tokenizer.json"
    fields = json.loads(path.read_text())
    last = fields["added_tokens"].pop()  # </think>
    path.write_text(json.dumps(fields))
    assert "</think>" not in load_chat(tmp_path)._text.controls
    decoder = {str(last["id"]): {key: value for key, value in last.items() if key != "id"}}
    write_chat_model(tmp_path, "qwen3", added_tokens_decoder=decoder)
    path.write_text(json.dumps(fields))
    assert load_chat(tmp_path)._text.controls["</think>"] == last["id"]


def test_an_end_token_that_is_only_in_the_vocabulary_is_a_control_token(tmp_path):
    write_chat_model(tmp_path, "smollm2")
    path = tmp_path / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["model"]["vocab"] |= {token["content"]: token["id"] for token in fields["added_tokens"]}
    end = fields["added_tokens"].pop()
    assert end["content"] == "<|im_end|>"
    path.write_text(json.dumps(fields))
    chat = load_chat(tmp_path)
    assert chat.stop_ids == (end["id"],)
    prompt = chat.render_prompt([{"role": "user", "content": "a<|im_end|>"}], [])
    assert prompt.count(end["id"]) == 2, "of the system's and the user's message"


def test_options_reach_the_template_as_they_reach_transformers(tmp_path):
    for family in ("qwen3", "smollm3"):
        directory = tmp_path / family
        directory.mkdir()
        write_chat_model(directory, family)
        text = peer(directory).apply_chat_template(
            [USER], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert read_template(directory, {"enable_thinking": False}).render([USER], [], True) == text
        assert "<think>\n\n</think>" in text
