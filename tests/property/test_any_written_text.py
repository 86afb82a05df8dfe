"""Whatever a model writes: no parser raises, nothing half-written is run, and what is well-formed comes out exact."""

import json

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.chat.tool_formats import FORMATS, MAX_CALLS

FAMILIES = list(FORMATS.values())

MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<think>",
    "</think>",
]
PIECES = [
    *MARKERS,
    *("{", "}", "[", "]", '"', "\\", ":", ",", ";", "(", ")", "=", " ", "\n", "'"),
    *("add", ".call(", '{"name": "add", ', '"arguments": {', '"parameters"', '"a": 1'),
    *("NaN", "-Infinity", "1e999", "9" * 30, '"\\ud800"', "\ud800", "null"),
    *("[" * 70, "{" * 2000, '{"a": ' * 80),
    *('{"name": "add", "arguments": {"a": 1}}', '[{"name": "add", "arguments": {}}]'),
]

texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=15).map("".join),
    st.text(),
)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(MARKERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["add", "look-up", "a.b"]), arguments), min_size=1, max_size=4)


def written(form, found):
    """A list of calls as a family writes it; `form` may name one of its other ways."""
    if form == "mistral named":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}" for name, values in found)
    if form == "llama3 call":
        return "".join(
            f"<|python_tag|>{name}.call({', '.join(f'{key}={json.dumps(value)}' for key, value in values.items())})"
            for name, values in found
        )
    family, _, tagged = form.partition(" ")
    text = FORMATS[family].write([{"name": name, "arguments": values} for name, values in found])
    return f"<|python_tag|>{text}" if tagged else text


FORMS = [*FORMATS, "mistral named", "llama3 call", "llama3 tag"]


def check(text):
    for family in FAMILIES:
        parsed = family.parse(text)
        assert len(parsed.tool_calls) <= MAX_CALLS + 1
        msgpack.packb(parsed.tool_calls)
        for call in parsed.tool_calls:
            assert set(call) == {"name", "arguments", "error"}
            assert isinstance(call["name"], str) and isinstance(call["arguments"], dict)
            if call["error"] is None:
                assert call["name"].strip() and call["name"] in text
            else:
                assert call["arguments"] == {} and len(call["error"]) < 600
        if not parsed.tool_calls:
            assert parsed.text.strip() in text


@given(texts)
@example("[TOOL_CALLS]\ud800[ARGS]{}")  # a name that no message can carry
@example("<|python_tag|>\ud800.call(a=1)")
def test_no_text_makes_a_parser_raise(text):
    check(text)


@given(st.sampled_from(FORMS), calls, st.data())
def test_no_damage_to_a_call_makes_a_parser_raise(form, given_calls, data):
    text = written(form, given_calls)
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 6)))
    check(text[:at] + data.draw(st.sampled_from(["", *PIECES])) + text[until:])


@given(st.sampled_from(FORMS), calls)
def test_well_formed_calls_come_out_as_they_were_meant(form, given_calls):
    parsed = FORMATS[form.split()[0]].parse(written(form, given_calls))
    assert parsed.tool_calls == [{"name": name, "arguments": values, "error": None} for name, values in given_calls]
    assert parsed.text == ""


@given(st.sampled_from(["hermes", "smollm", "mistral", "mistral named", "llama3"]), calls, st.data())
def test_a_call_that_was_cut_short_is_never_run(form, given_calls, data):
    """One call, cut anywhere: nothing of it runs."""
    text = written(form, given_calls[:1])
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    assert all(call["error"] is not None for call in FORMATS[form.split()[0]].parse(cut).tool_calls)


LONG = 1_000_000


STARTS = ["", '<tool_call>{"a":', "[TOOL_CALLS] [", "[TOOL_CALLS]add", "<|python_tag|>a.call(x=", '{"name":']
REPEATED = [
    *MARKERS,
    *("[", "{", "(", '"', "\\", " ", ";", "=", "9", "a", '"a",', '"a":1,'),
    *('{"name": "add", ', '<tool_call>["', '<tool_call>{"a":"', "<tool_call>[]</tool_call>"),
    *("[TOOL_CALLS] ", "[TOOL_CALLS]a ", "<|python_tag|>a.call(a=1,", '{"name":"a","parameters":{}};'),
]


@pytest.mark.parametrize("piece", REPEATED)
@pytest.mark.parametrize("start", STARTS)
def test_a_megabyte_of_anything_is_read_in_linear_time(start, piece):
    """What takes quadratic time would not end within a test's time limit."""
    text = start + piece * (LONG // len(piece))
    for family in FAMILIES:
        family.parse(text)
