"""Tool calls in the text of a turn, per model family: what is run, what is refused and how the refusal reads."""

import json
from pathlib import Path

import pytest

from pipeline.chat.call_json import MAX_DEPTH
from pipeline.chat.tool_formats import FORMATS, MAX_CALLS, describe, detect, find_tool_format
from pipeline.errors import ConfigError

HERMES, SMOLLM, LLAMA3, MISTRAL = (FORMATS[name] for name in ("hermes", "smollm", "llama3", "mistral"))
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}, "error": None}


def tagged(*texts):
    return "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def named(name, **arguments):
    return {"name": name, "arguments": arguments, "error": None}


def only_error(parsed):
    """The error of the one call there is, which nothing can run."""
    (call,) = parsed.tool_calls
    assert call["error"] is not None and call["arguments"] == {}
    return call["error"]


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (HERMES, tagged(ADD), [CALL]),
        (HERMES, tagged(ADD, '{"name": "stop", "arguments": {}}'), [CALL, named("stop")]),
        (HERMES, f"<tool_call>{ADD}</tool_call>", [CALL]),
        (SMOLLM, tagged(f"[{ADD}, {ADD}]"), [CALL, CALL]),
        (SMOLLM, tagged(ADD), [CALL]),
        (SMOLLM, tagged("[]"), []),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1, "b": 2}}', [CALL]),
        (LLAMA3, f"<|python_tag|>{ADD}", [CALL]),
        (LLAMA3, f"<|python_tag|>{ADD}; {ADD}", [CALL, CALL]),
        (LLAMA3, f"{ADD};\n{ADD}", [CALL, CALL]),
        (LLAMA3, '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', [CALL]),
        (LLAMA3, '<|python_tag|>find.call(q="a, b)", n=3, tags=["x"])', [named("find", q="a, b)", n=3, tags=["x"])]),
        (LLAMA3, "<|python_tag|>now.call()", [named("now")]),
        (MISTRAL, f"[TOOL_CALLS] [{ADD}, {ADD}]", [CALL, CALL]),
        (MISTRAL, f'[TOOL_CALLS][{ADD[:-1]}, "id": "abcdefghi"}}]', [CALL]),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]stop[ARGS]{}', [CALL, named("stop")]),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}', [CALL]),
        (MISTRAL, '[TOOL_CALLS]add{"a": 1, "b": 2}', [CALL]),
    ],
)  # fmt: skip
def test_each_family_reads_its_own_calls_in_order(family, text, expected):
    parsed = family.parse(text)
    assert parsed.tool_calls == expected
    assert parsed.text == ""


@pytest.mark.parametrize("family", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("text", ["", "The sum is 3.", '{"answer": 3}', "{", "</tool_call>", " spaced\n"])
def test_text_without_a_call_stays_as_it_is(family, text):
    assert family.parse(text) == (text, [])


def test_text_around_calls_is_kept():
    assert HERMES.parse(f"I add. {tagged(ADD)}\nThen more.").text == "I add. \nThen more."
    assert MISTRAL.parse(f"First.[TOOL_CALLS] [{ADD}] done").text == "First. done"
    assert LLAMA3.parse(f"I add.<|python_tag|>{ADD}").text == "I add."


@pytest.mark.parametrize("family", FORMATS.values(), ids=FORMATS)
def test_each_family_reads_the_call_that_it_tells_the_model_to_write(family):
    written = family.form.replace("NAME", "add").replace("…", '"a": 1, "b": 2')
    assert family.parse(written) == ("", [CALL])


@pytest.mark.parametrize(
    ("json_text", "says"),
    [
        ("", "Expecting value"),
        ("null", "it is null, not an object"),
        ("3", "it is 3, not an object"),
        ("{'name': 'add', 'arguments': {}}", "in double quotes"),
        ('{"name": "add", "arguments": {"a": 1, "b": }}', "at character 43 of it (Expecting value)"),
        ('{"name": "add"}', "it has no arguments"),
        ('{"arguments": {}}', "it has no name"),
        ('{"name": "", "arguments": {}}', "its name is '', not the name of a tool"),
        ('{"name": ["add"], "arguments": {}}', "not the name of a tool"),
        ('{"name": "%s", "arguments": {}}' % ("x" * 129), "longer than 128 characters"),
        ('{"name": "add", "arguments": [1, 2]}', "its arguments are [1, 2], not an object"),
        ('{"name": "add", "arguments": null}', "its arguments are null, not an object"),
        ('{"name": "add", "arguments": "[1]"}', "the text '[1]', not an object"),
        ('{"name": "add", "arguments": "a=1"}', "a text that can't be read as an object"),
        ('{"name": "add", "arguments": "{} {}"}', "the text '{} {}', not an object"),
        ('{"name": "add", "arguments": "\\"{}\\""}', "not an object"),
        ('{"name": "add", "arguments": {}, "parameters": {}}', "both arguments and parameters"),
        ('{"name": "add", "arguments": {"a": 1}, "b": 2}', "the key 'b' beside its name and arguments"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "the key 'a' stands twice"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON number"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is no JSON number"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "the number 1e999 is too large"),
        ('{"name": "add", "arguments": {"a": %s}}' % ("9" * 100_000), "more than 19 digits"),
        ('{"name": "add", "arguments": {"a": 9223372036854775808}}', "beyond 64 bits"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "add", "arguments": {"\\udc00": 1}}', "half of a surrogate pair"),
        (f'{{"name": "add", "arguments": {{"a": {"[" * MAX_DEPTH}{"]" * MAX_DEPTH}}}}}', "more than 64 deep"),
        ("[" * 100_000, "more than 64 deep"),
        (ADD + ADD, "follows its JSON without </tool_call>"),
        (ADD + " and so on", "'and so on\\n</tool_cal' follows its JSON"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_never_run_and_says_why(json_text, says):
    text = f"Let me see. {tagged(json_text)} Now?"
    parsed = HERMES.parse(text)
    error = only_error(parsed)
    assert says in error
    assert error.startswith("this call was not run: ") and error.endswith(f"Write {HERMES.form}")
    assert parsed.text == text  # what can't be read stays where it stood
    assert len(error) < 300


def test_the_name_of_a_call_that_is_not_run_is_kept_where_it_can_be_read():
    calls = HERMES.parse(tagged('{"name": "add", "arguments": 3}', "{}", ADD + "!")).tool_calls
    assert [call["name"] for call in calls] == ["add", "", "add"]


def test_a_call_without_its_closing_tag_is_not_run():
    """The turn may have been cut there, in the middle of a list of calls."""
    assert "it ends without </tool_call>" in only_error(HERMES.parse(f"<tool_call>{ADD}"))
    assert "it ends without </tool_call>" in only_error(SMOLLM.parse(f"<tool_call>[{ADD}]"))


def test_a_malformed_call_does_not_take_the_next_one_with_it():
    for broken in ("<tool_call>{oh</tool_call>", "<tool_call>{oh", f"<tool_call>{ADD}", "<tool_call>"):
        first, second = HERMES.parse(broken + tagged(ADD)).tool_calls
        assert first["error"] is not None and second == CALL
    first, second = MISTRAL.parse(f"[TOOL_CALLS] [oh[TOOL_CALLS] [{ADD}]").tool_calls
    assert first["error"] is not None and second == CALL
    first, second = LLAMA3.parse(f"<|python_tag|>oh()<|python_tag|>{ADD}").tool_calls
    assert first["error"] is not None and second == CALL


def test_items_of_a_list_stand_for_themselves():
    parsed = SMOLLM.parse(tagged(f'[{ADD}, 3, {{"name": "add"}}]'))
    assert [call["error"] is None for call in parsed.tool_calls] == [True, False, False]


@pytest.mark.parametrize(
    "inner", ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</think>", "\\n}", "\n"]
)
@pytest.mark.parametrize(
    ("family", "text"),
    [
        (HERMES, '<tool_call>{"name": "say", "arguments": {"x": "INNER"}}</tool_call>'),
        (SMOLLM, '<tool_call>[{"name": "say", "arguments": {"x": "INNER"}}]</tool_call>'),
        (LLAMA3, '{"name": "say", "parameters": {"x": "INNER"}}'),
        (LLAMA3, '<|python_tag|>say.call(x="INNER")'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "say", "arguments": {"x": "INNER"}}]'),
        (MISTRAL, '[TOOL_CALLS]say[ARGS]{"x": "INNER"}'),
    ],
)  # fmt: skip
def test_markers_within_a_string_belong_to_it(family, text, inner):
    said = inner.replace("\\n", "\n")
    assert family.parse(text.replace("INNER", inner)) == ("", [named("say", x=said)])


def test_arguments_as_json_text_are_decoded_once():
    arguments = json.dumps({"a": 1, "b": '{"c": 2}'})
    (call,) = HERMES.parse(tagged(json.dumps({"name": "add", "arguments": arguments}))).tool_calls
    assert call == named("add", a=1, b='{"c": 2}')


def test_what_the_model_thinks_is_never_a_call():
    thought = f"I could write {tagged(ADD)} or <tool_call> alone."
    assert HERMES.parse(f"<think>{thought}</think>{tagged(ADD)}") == (f"<think>{thought}</think>", [CALL])
    assert HERMES.parse(f"{thought}</think>\n\n{tagged(ADD)}").tool_calls == [CALL]  # opened by the template
    assert HERMES.parse(f"<think>{thought}") == (f"<think>{thought}", [])  # cut
    assert MISTRAL.parse(f"[THINK]{thought}[/THINK][TOOL_CALLS] [{ADD}]").tool_calls == [CALL]
    assert LLAMA3.parse(f"<think>hm</think>\n{ADD}") == ("<think>hm</think>", [CALL])


def test_a_turn_holds_only_so_many_calls():
    parsed = HERMES.parse(tagged(*[ADD] * (MAX_CALLS + 2)))
    assert parsed.tool_calls[:-1] == [CALL] * MAX_CALLS
    assert f"more than {MAX_CALLS} calls" in parsed.tool_calls[-1]["error"]
    listed = SMOLLM.parse(tagged(f"[{', '.join([ADD] * (MAX_CALLS + 1))}]"))
    assert f"more than {MAX_CALLS} calls" in only_error(listed)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|python_tag|>print(1 + 1)", "it begins with 'print(1 + 1)', not with a JSON object"),
        ("<|python_tag|>add.call(1, 2)", "in add.call(…) what follows is not key=value"),
        ("<|python_tag|>add.call(a='x')", "in add.call(…) the value of a is not JSON"),
        ("<|python_tag|>add.call(a=__import__)", "in add.call(…) the value of a is not JSON"),
        ("<|python_tag|>add.call(a=1, a=2)", "the key a stands twice"),
        ("<|python_tag|>add.call(a=1", "add.call(…) is not closed"),
        ("<|python_tag|>add.call(", "what follows is not key=value"),
        ("<|python_tag|>", "it begins with ''"),
        ('{"name": "add", "parameters": {"a": 1,', "its JSON is wrong"),
    ],
)
def test_llama_calls_that_are_not_run(text, says):
    assert says in only_error(LLAMA3.parse(text))


@pytest.mark.parametrize("text", ["", " add", "add[ARGS]", 'add[ARGS]{"a":', " [1]", 'add[ARGS]"{}"'])
def test_mistral_calls_that_are_not_run(text):
    only_error(MISTRAL.parse("[TOOL_CALLS]" + text))


TEMPLATES = {
    "hermes": '{%- for tool_call in message.tool_calls %}{{- \'<tool_call>\\n{"name": "\' }}{%- endfor %}',
    "smollm": "The example format is as follows. <tool_call>[\n{'name': 'f'}]</tool_call>",
    "llama3": "{%- if builtin_tools is defined %}{{- '<|python_tag|>' + tool_call.name + '.call(' }}{%- endif %}",
    "mistral": "{%- elif message.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_how_its_tools_are_called(name):
    assert detect(TEMPLATES[name]) == name
    assert find_tool_format(name) is FORMATS[name]


@pytest.mark.parametrize(
    "source",
    [
        "{{ message.content }}",
        "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' }}",
        "{{ '<tool_call>' + tc.name }}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>{% endfor %}",
        "{{'<｜tool▁calls▁begin｜>'}}",
    ],
)
def test_another_form_of_calls_is_not_taken_for_one_of_these(source):
    assert detect(source) is None


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama3_1", "llama3"), ("mistral", "mistral"), ("qwen2_5", "hermes"), ("qwen3", "hermes"), ("smollm3", "hermes")],
)
def test_the_templates_of_families_are_told_apart(family, name):
    path = Path(__file__).parent.parent / "data" / "templates" / f"{family}.jinja"
    assert detect(path.read_text(encoding="utf-8")) == name


def test_a_template_without_tools_is_told_them_in_the_form_that_is_read():
    schema = {"type": "function", "function": {"name": "add", "description": "Größe", "parameters": {}}}
    text = describe([schema, schema])
    assert text.count(json.dumps(schema, ensure_ascii=False)) == 2
    example = text[text.rindex("<tool_call>") :]
    written = example.replace("<function-name>", '"add"').replace("<args-json-object>", '{"a": 1, "b": 2}')
    assert HERMES.parse(written) == ("", [CALL])
    assert describe([]) == ""


@pytest.mark.parametrize("name", FORMATS)
def test_each_family_reads_what_it_writes_and_what_it_describes(name):
    two = [named("say", text='</tool_call> "ü"\n'), CALL]
    assert FORMATS[name].parse(FORMATS[name].write(two)) == ("", two)
    told = describe([{"type": "function"}], name)
    assert FORMATS[name].parse(told[told.rindex(":\n") + 2 :]).tool_calls != []


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="'xml'; it must be one of hermes, smollm, llama3, mistral"):
        find_tool_format("xml")
