"""The tokenizer and template files of a model directory: what is read from which, and what is said of a wrong one."""

import json

import pytest
from chat_models import FAMILIES, trained, write_chat_model

from pipeline.chat.model_chat import load_chat
from pipeline.errors import ConfigError


def test_stop_ids_come_from_generation_config_tokenizer_and_template(tmp_path):
    write_chat_model(tmp_path)
    tokenizer = trained()
    ids = {text: tokenizer.get_vocab_size() + index for index, text in enumerate(FAMILIES["qwen2_5"][0])}
    end, text_end = ids["<|im_end|>"], ids["<|endoftext|>"]
    assert load_chat(tmp_path).stop_ids == (end,)
    for value in (text_end, [text_end, end], [text_end, 10**6]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert load_chat(tmp_path).stop_ids == (text_end, end)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": text_end}))
    assert load_chat(tmp_path).stop_ids == (text_end, end)
    (tmp_path / "config.json").unlink()
    for value in ("2", [text_end, 2.0], True):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is .*; it is a token's id or"):
            load_chat(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    write_chat_model(
        tmp_path, template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", eos_token=None
    )
    with pytest.raises(ConfigError, match='No token of .* ends a turn: .* Set "eos_token_id"'):
        load_chat(tmp_path)


def test_holes_among_the_ids_are_named(tmp_path):
    write_chat_model(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    last = fields["added_tokens"][-1]["id"]
    hole = fields["model"]["vocab"].pop("z")
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=f"has the id {last - 4} there, but {last - 5} when it is loaded"):
        load_chat(tmp_path)
    fields["model"]["vocab"] |= {token["content"]: token["id"] for token in fields["added_tokens"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    chat = load_chat(tmp_path)
    assert (chat.unused_ids, chat.vocab_size) == ((hole,), last + 1)


@pytest.mark.parametrize(
    ("present", "missing", "sentence"),
    [
        (["tokenizer.model"], "tokenizer.json", "has tokenizer.model, but not tokenizer.json, .*save_pretrained"),
        (["vocab.json", "merges.txt"], "tokenizer.json", "has vocab.json, but not tokenizer.json"),
        ([], "tokenizer.json", "has no tokenizer.json. Fetch"),
        ([], "chat_template.jinja", "has no chat template. .* Add chat_template.jinja"),
    ],
)
def test_a_missing_file_is_named_with_what_to_do(tmp_path, present, missing, sentence):
    write_chat_model(tmp_path)
    (tmp_path / missing).unlink()
    for name in present:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=sentence):
        load_chat(tmp_path)


@pytest.mark.parametrize(
    "added", [[{"id": 3}], [{"content": "<a>"}], ["<a>"], {"<a>": 3}, [{"id": "3", "content": "<a>"}]]
)
def test_an_added_token_without_id_or_content_is_named(tmp_path, added):
    write_chat_model(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | {"added_tokens": added}))
    with pytest.raises(ConfigError, match=r"tokenizer.json has the added token .*, which has no id and content"):
        load_chat(tmp_path)


@pytest.mark.parametrize("decoder", [{"x": {"content": "<a>"}}, {"3": {}}, {"3": "<a>"}, [{"content": "<a>"}]])
def test_tokens_of_the_config_without_id_or_content_are_named(tmp_path, decoder):
    write_chat_model(tmp_path, added_tokens_decoder=decoder)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json has the added token|added_tokens_decoder.* holds no"):
        load_chat(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[1]"), ("tokenizer.json", '{"a": 1}')]
)
def test_a_broken_file_is_named(tmp_path, name, text):
    write_chat_model(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        load_chat(tmp_path)


def test_an_option_that_the_template_never_reads_is_refused(tmp_path):
    write_chat_model(tmp_path)
    with pytest.raises(ConfigError, match="'enable_thinking' has no effect .* the template never reads it"):
        load_chat(tmp_path, options={"enable_thinking": False})
    with pytest.raises(ConfigError, match="'messages' has no effect .* it is set by Headway"):
        load_chat(tmp_path, options={"messages": 1})
    with pytest.raises(ConfigError, match="'user' has no effect"):  # a word of its text is no variable
        load_chat(tmp_path, options={"user": 1})


def test_a_variable_with_a_default_is_an_option(tmp_path):
    template = "{% if terse is not defined %}{% set terse = 'no' %}{% endif %}{{ terse }}"
    write_chat_model(
        tmp_path,
        template=template + "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}",
    )
    chat = load_chat(tmp_path, options={"terse": "yes"})
    assert chat.decode(chat.render_prompt([{"role": "user", "content": "x"}], [])).startswith("yes")


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    write_chat_model(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "\ud83d"}))
    with pytest.raises(ConfigError, match=r"tokenizer_config.json holds half a surrogate pair"):
        load_chat(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "\U0001f600"}))
    load_chat(tmp_path)


def test_a_tokenizer_that_its_library_panics_at_is_refused(tmp_path):
    write_chat_model(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "é" * 50
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"tokenizer.json of .* can't be loaded: .{1,303}\. Fetch it again"):
        load_chat(tmp_path)
