"""What the endpoint reads of a request: OpenAI's fields served, passed over or refused, each by name."""

import json

import pytest

from pipeline.endpoint.chat_request import ChatRequest, Served, read_chat_request
from pipeline.endpoint.messages import message_key, read_messages, read_tools
from pipeline.endpoint.refusal import Refusal
from pipeline.endpoint.request_body import read_body

SERVED = Served("headway", temperature=1.0, top_p=1.0, top_k=-1)
ASK = {"role": "user", "content": "Where?"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def request(**fields):
    return read_chat_request({"model": "headway", "messages": [ASK]} | fields, SERVED)


def refusal(**fields):
    with pytest.raises(Refusal) as caught:
        request(**fields)
    return caught.value


def call(arguments, call_id="call00001", name="look"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content, *calls, **more):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {}) | more


def key(message):
    return message_key(read_messages([message])[0])


def test_a_plain_request():
    assert request() == ChatRequest(messages=[ASK], tools=[])


def test_what_a_request_may_ask_for():
    asked = request(
        max_completion_tokens=12, stream=True, stream_options={"include_usage": True}, logprobs=True, tools=[LOOK]
    )
    assert (asked.turn_cap, asked.stream, asked.include_usage, asked.logprobs) == (12, True, True, True)
    assert asked.tools == [{"type": "function", "function": {"description": ""} | LOOK["function"]}]
    assert request(max_tokens=7).turn_cap == request(max_tokens=7, max_completion_tokens=7).turn_cap == 7


def test_fields_that_say_what_holds_anyway_are_served():
    assert (
        request(
            temperature=1,
            top_p=1.0,
            n=1,
            tool_choice="auto",
            parallel_tool_calls=True,
            presence_penalty=0,
            logit_bias={},
            stop=None,
            response_format={"type": "text"},
            user="me",
            seed=None,
        )
        == request()
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0.9),
        ("top_k", 5),
        ("n", 2),
        ("n", True),
        ("stop", "###"),
        ("seed", 3),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1.0}),
        ("reasoning_effort", "low"),
        ("functions", []),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_completion_tokens", 2**31),
        ("stream", 1),
        ("logprobs", "yes"),
        ("tools", {}),
        ("messages", []),
        ("messages", "hello"),
    ],
)
def test_every_other_field_is_refused_by_its_name(field, value):
    refused = refusal(**{field: value})
    assert refused.status == 400
    error = refused.body()["error"]
    assert error["param"] == field and field in error["message"] and error["type"] == "invalid_request_error"


def test_the_other_model_is_refused():
    with pytest.raises(Refusal, match="serves 'headway'") as caught:
        read_chat_request({"messages": [ASK]}, SERVED)
    assert caught.value.status == 404
    assert refusal(model="gpt-4o").param == "model"


def test_limits_and_stream_options_that_contradict_each_other():
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(stream=True, stream_options={"usage": True}).param == "stream_options"
    assert refusal(tool_choice="none", tools=[LOOK]).param == "tool_choice"
    assert request(tool_choice="none").tools == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "Expecting"),
        (b"[]", "a list"),
        (b'"text"', "a text"),
        (b"null", "null"),
        (b"\xac{}", "no UTF-8 at byte 0"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": Infinity}', "Infinity is no JSON number"),
        (b'{"a": "\\ud800"}', "'a' holds what can't be sent on"),
        (b'{"big": 100000000000000000000}', "'big' holds what can't be sent on"),
        (b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 64 deep"),
        (b'{"deep": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 64 deep"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body, says):
    with pytest.raises(Refusal, match="Send one JSON object") as caught:
        read_body(body)
    assert says in str(caught.value) and caught.value.status == 400


def test_bodies_are_read_whole():
    assert read_body(b"") == {}
    text = "naïve \u2028 😀"
    for escaped in (True, False):
        assert read_body(json.dumps({"a": text}, ensure_ascii=escaped).encode()) == {"a": text}


def test_messages_are_brought_into_one_form():
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        ASK | {"name": None},
        assistant(None, call('{"where": "here"}'), refusal=None, annotations=[], audio=None, function_call=None),
        {"role": "tool", "tool_call_id": "call00001", "content": "nothing"},
    ]
    assert read_messages(given) == [
        {"role": "system", "content": "Be brief."},
        ASK,
        assistant("", call({"where": "here"})),
        {"role": "tool", "content": "nothing", "tool_call_id": "call00001"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"content": "hello"}, "messages[0]"),
        ({"role": "function", "content": "hello"}, "messages[0]"),
        ({"role": ["user"], "content": "hello"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "audio": {"id": 1}}, "messages[0].audio"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        (assistant("", "look"), "messages[0].tool_calls[0]"),
        (assistant("", {"function": {"name": "look", "arguments": "{}"}}), "messages[0].tool_calls[0]"),
        (assistant("", call("{")), "messages[0].tool_calls[0].function"),
        (assistant("", call("[]")), "messages[0].tool_calls[0].function"),
        (assistant("", call("{}", name="")), "messages[0].tool_calls[0].function"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message, param):
    refused = refusal(messages=[message])
    assert refused.param == param and "messages[0]" in str(refused)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ("look", "tools[0]"),
        ({"type": "custom", "custom": {}}, "tools[0]"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "look", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "look", "strict": "yes"}}, "tools[0].function.strict"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_named(tool, param):
    assert refusal(tools=[tool]).param == param


@pytest.mark.parametrize("given", [("name", "description", "parameters"), ("parameters", "name", "description")])
def test_a_tool_is_shown_to_the_model_as_it_was_given(given):
    whole = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    function = {key: whole[key] for key in given}
    (tool,) = request(tools=[{"type": "function", "function": function}]).tools
    assert list(tool["function"].items()) == list(function.items()), "templates write the keys in their order"
    (tool,) = request(tools=[{"type": "function", "function": {"name": "look"}}]).tools
    assert list(tool["function"]) == ["name", "description", "parameters"]


def test_messages_that_say_the_same_are_the_same():
    said = assistant("", call('{"a": 1, "b": [1.5, "é"]}'))
    same = assistant(None, call('{"b":[1.5,"\\u00e9"],"a":1.0}'), refusal=None, annotations=[])
    assert key(said) == key(same)
    assert key(ASK) == key({"role": "user", "content": [{"type": "text", "text": "Where?"}]})
    assert key({"role": "system", "content": "x"}) == key({"role": "developer", "content": "x"})


def test_messages_that_differ_are_told_apart():
    keys = [
        key(message)
        for message in (
            ASK,
            ASK | {"content": "Where? "},
            ASK | {"role": "system"},
            ASK | {"name": "me"},
            assistant(""),
            assistant("", call('{"a": 1}')),
            assistant("", call('{"a": true}')),
            assistant("", call('{"a": "1"}')),
            assistant("", call('{"a": 1}', call_id="call00002")),
            assistant("", call('{"a": 1}', name="see")),
            assistant("x", call('{"a": 1}')),
            assistant("", call('{"a": 1}'), call('{"a": 1}')),
            {"role": "tool", "tool_call_id": "a", "content": "x"},
            {"role": "tool", "tool_call_id": "b", "content": "x"},
        )
    ]
    assert len(set(keys)) == len(keys)


def test_strict_is_taken_and_not_shown_to_the_model():
    function = {"name": "look", "description": "", "parameters": {"type": "object"}}
    for strict in (True, False, None):
        assert read_tools([{"type": "function", "function": function | {"strict": strict}}]) == [
            {"type": "function", "function": function}
        ]
