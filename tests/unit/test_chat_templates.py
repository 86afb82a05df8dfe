"""Chat templates render as transformers renders them; what is missing or wrong is told in one sentence."""

import pytest
from chat_models import ADD, FAMILIES, write_chat_model

from pipeline.chat.model_chat import load_chat
from pipeline.chat.template import read_template

SYSTEM = {"role": "system", "content": "Be brief. <b>é</b>"}
USER = {"role": "user", "content": "What is 1 + 2? "}
ARGUMENTS = {"a": 1, "é": '"<'}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": '"<'}}}
    ],
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
