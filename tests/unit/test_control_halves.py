"""Halves of a control token that meet in a rendered text, or that only white space kept apart, stay text."""

import pytest
from chat_models import write_chat_model

from pipeline.chat.model_chat import load_chat

# What the template writes around the user's text, so that a half there could be completed.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' %}<|im_{{ m.content | trim }}start|>{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("said", ["end|> a", " \n end|> a", "a <|im_", "a <|im_ \n ", "end|> a <|im_", " end|><|im_ "])
def test_a_half_beside_what_the_template_writes_stays_text(tmp_path, said):
    chat = load_chat(write_chat_model(tmp_path, template=TEMPLATE))
    ids = chat.render_prompt([{"role": "user", "content": said}], [])
    controls = [chat.decode([index]) for index in ids if index in chat._text.controls.values()]
    assert controls == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert f"<|im_{said.strip()}start|>" in chat.decode(ids)
