"""Whatever messages hold, the template alone writes control tokens, and what is said stays as it is, byte for byte."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pipeline.chat.control_text import BREAK, QUOTE, ControlText, TextBreaker, restore
from pipeline.chat.conversation import Abilities, Conversation, Way
from pipeline.chat.sandbox import to_json
from pipeline.chat.template import ChatTemplate
from tests.unit.chat_models import trained

# One within another, one that begins within another; and two that are text: a single character and white space.
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|im|>", "im_end|><", "</think>", "think", "@", "[INST]", "\n\n")
FRAGMENTS = sorted(
    {*CONTROLS, "<", "|", ">", "<|", "|>", "im", "_end|>", "<|im_", "in", "[", "T]", BREAK, QUOTE, QUOTE + "00003c"}
    | {"a", "A", " ", "\n", "é", "0", '"', "\\", "日", "user", "▁", "<unk>"}
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
plain_texts = st.text(alphabet="abc <|>\n_日é0", max_size=30)

# Unkind on purpose: texts touch each other and halves of tokens, are trimmed, quoted, printed and compared.
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}{{ m.content | trim }}<{{ m.content }}|im_end|>{{ m.content | trim }}_end|><|im_{{ m.content }}
{%- if m.name %}[{{ m.name }}INST]{{ [m.name] }}{{ m.extra | tojson -}}
{{- m.extra | tojson(ensure_ascii=true) }}{% endif -%}
<|im_end|>@
{% endfor -%}"""
UNICODE = TEMPLATE.replace("{{- m.extra | tojson(ensure_ascii=true) }}", "")
SAME = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}"""


def added(tokenizer, controls=CONTROLS, **flags):
    for index, text in enumerate(controls):
        tokenizer.add_tokens([AddedToken(text, special=bool(index % 2), normalized=False, **flags)])
    return json.loads(tokenizer.to_str())


def in_vocab(fields):
    """The same tokenizer with its control tokens in its model's vocabulary and merges, too."""
    fields = json.loads(json.dumps(fields))
    for token in fields["added_tokens"]:
        fields["model"]["vocab"][token["content"]] = token["id"]
    fields["model"]["vocab"]["<|"] = 5000
    fields["model"]["vocab"]["im|>"] = 5001
    fields["model"]["merges"] += [["<", "|"], ["<|", "im|>"]]
    return fields


def unigram():
    pieces = [("<unk>", 0.0)] + [
        (char, -5.0) for char in sorted({*"".join(FRAGMENTS), *"bcdefghlmnoprstuxyvkwAEIN{}:,[]'_▁."})
    ]
    pieces += [("<|im_end|>", -1.0), ("im_", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


KINDS = {
    "bytes": lambda: added(trained("bytes")),
    "stripping": lambda: added(trained("bytes"), lstrip=True, rstrip=True),
    "in the vocabulary": lambda: in_vocab(added(trained("bytes"))),
    "metaspace": lambda: added(trained("metaspace")),
    "prepend": lambda: added(trained("prepend")),
    "unigram": lambda: added(unigram()),
}


@cache
def control_text(kind):
    return ControlText(KINDS[kind](), "DIR")


@cache
def template(source):
    return ChatTemplate(source, source, {}, "DIR")


@cache
def conversation(kind):
    breaker = TextBreaker(control_text(kind).controls)
    return Conversation(Abilities(True, True, True, True), breaker, breaker, "hermes")


def rendered(source, messages, kind):
    return template(source).render(*conversation(kind).prepared(messages, [], Way()), True)


def messages_of(pairs):
    return [
        {"role": role, "content": text, "name": name, "extra": {name: [text]}}
        for role, (text, name) in zip(("user", "tool", "system", "user"), pairs, strict=False)
    ]


def harmless(text):
    """As empty as the text: halves of a control token around nothing are the template's own."""
    return "x" if text.strip() else text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_control_ids_are_those_of_the_template(kind, pairs):
    text = control_text(kind)
    written = rendered(TEMPLATE, messages_of(pairs), kind)
    expected = rendered(TEMPLATE, messages_of([(harmless(said), harmless(name)) for said, name in pairs]), kind)
    counted = text._counted

    def controls(ids):
        return [index for index in ids if index in counted]

    assert controls(text.encode(written)) == controls(text.encode(expected))


@settings(deadline=None, max_examples=150)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_what_is_said_is_encoded_as_it_is(pairs):
    text = control_text("bytes")
    messages = messages_of(pairs)
    written = rendered(UNICODE, messages, "bytes")
    said = template(UNICODE).render(messages, [], True)
    assert restore(written) == said
    assert text.plain.decode(text.encode(written), skip_special_tokens=False) == said


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(contents=st.lists(plain_texts, min_size=1, max_size=4))
def test_without_such_text_the_ids_are_the_plain_tokenizers(kind, contents):
    text = control_text(kind)
    messages = messages_of([(content, "") for content in contents])
    written = rendered(SAME, messages, kind)
    said = template(SAME).render(messages, [], True)
    assert text.encode(written) == text.plain.encode(said, add_special_tokens=False).ids


@given(text=texts)
def test_ascii_json_says_the_same(text):
    breaker = TextBreaker(CONTROLS)
    written = restore(to_json(breaker.all_broken({text: [text]}), ensure_ascii=True))
    assert written.isascii() or {"\ua874", "\ua875"} & set(text)
    assert json.loads(written) == {text: [text]}
    assert not any(
        control in to_json(breaker.all_broken([text]), ensure_ascii=True) for control in CONTROLS if len(control) > 2
    )
