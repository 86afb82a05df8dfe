"""What the endpoint answers: a completion, or the chunks of a stream, read as OpenAI's own client reads them."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pipeline.chat.format import ModelTurn
from pipeline.endpoint.chat_reply import Answer, Envelope, completion, stream
from pipeline.endpoint.chat_request import ChatRequest

ENVELOPE = Envelope("chatcmpl-1-1", 1_700_000_000, "headway")
LOOK = {"id": "call00001", "name": "look", "arguments": {"where": "hére"}, "error": None}
SEE = {"id": "call00002", "name": "see", "arguments": {}, "error": None}
BROKEN = {"id": "call00003", "name": "", "arguments": {}, "error": "this call was not run: it has no name."}


def text_of(ids):
    return "".join({5: "he", 6: "llo", 7: "�", 8: "é"}.get(index, "<end>") for index in ids)


def answer(text="hello", calls=(), stopped=True, ids=(5, 6, 1)):
    logprobs = [-0.5 * (1 + index) for index in range(len(ids))]
    return Answer(ModelTurn(list(ids), text, list(calls)), stopped, logprobs, [3] * len(ids), 20, 8)


def whole(given, **asked):
    request = ChatRequest(messages=[], tools=[], **asked)
    return ChatCompletion.model_validate(json.loads(json.dumps(completion(given, request, ENVELOPE, text_of))))


def chunks(given, **asked):
    parts = list(stream(given, ChatRequest(messages=[], tools=[], stream=True, **asked), ENVELOPE, text_of))
    assert all(part.startswith(b"data: ") and part.endswith(b"\n\n") for part in parts)
    assert parts.pop() == b"data: [DONE]\n\n"
    return [ChatCompletionChunk.model_validate(json.loads(part.removeprefix(b"data: "))) for part in parts]


@pytest.mark.parametrize(
    ("given", "reason", "content", "names"),
    [
        (answer(), "stop", "hello", []),
        (answer(stopped=False), "length", "hello", []),
        (answer("", [LOOK, SEE]), "tool_calls", None, ["look", "see"]),
        (answer("hm", [LOOK]), "tool_calls", "hm", ["look"]),
        (answer("", [LOOK], stopped=False), "length", None, ["look"]),
        (answer("<tool_call>{", [BROKEN]), "stop", "<tool_call>{", []),
        (answer("<tool_call>{", [LOOK, BROKEN]), "tool_calls", "<tool_call>{", ["look"]),
        (answer("", ids=(1,)), "stop", "", []),
    ],
)
def test_a_stream_says_what_the_whole_answer_says(given, reason, content, names):
    (choice,) = whole(given).choices
    assert (choice.finish_reason, choice.message.content) == (reason, content)
    assert [call.function.name for call in choice.message.tool_calls or []] == names
    text, calls, reasons = "", [], []
    for chunk in chunks(given):
        (part,) = chunk.choices
        text += part.delta.content or ""
        calls += part.delta.tool_calls or []
        reasons.append(part.finish_reason)
    assert text == (content or "") and reasons == [None] * (len(reasons) - 1) + [reason]
    assert [call.index for call in calls] == list(range(len(names)))
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        (call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
    ]


def test_arguments_are_json_text_and_calls_have_their_ids():
    first, second = whole(answer("", [LOOK, SEE])).choices[0].message.tool_calls
    assert (first.id, json.loads(first.function.arguments)) == ("call00001", {"where": "hére"})
    assert (second.id, second.function.arguments) == ("call00002", "{}")


def test_usage_counts_the_context_and_every_sampled_id():
    usage = whole(answer()).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 3, 23)
    assert usage.prompt_tokens_details.cached_tokens == 8
    assert all(chunk.usage is None for chunk in chunks(answer()))
    *others, last = chunks(answer(), include_usage=True)
    assert last.usage == usage and last.choices == [] and all(chunk.usage is None for chunk in others)


def test_the_sampled_ids_come_along_with_their_versions():
    expected = {"token_ids": [5, 6, 1], "versions": [3, 3, 3]}
    assert whole(answer()).model_extra["headway"] == expected
    assert [chunk.model_extra.get("headway") for chunk in chunks(answer())][-1] == expected


def test_log_probs_are_those_of_each_sampled_id():
    given = answer(ids=(5, 7, 8, 1))
    content = whole(given, logprobs=True).choices[0].logprobs.content
    assert [(one.token, one.logprob) for one in content] == [("he", -0.5), ("�", -1.0), ("é", -1.5), ("<end>", -2.0)]
    assert content[1].bytes is None, "part of a character has no bytes of its own that we could tell"
    assert bytes(content[2].bytes).decode() == "é"
    (streamed,) = [chunk.choices[0].logprobs for chunk in chunks(given, logprobs=True) if chunk.choices[0].logprobs]
    assert streamed.content == content
    assert whole(given).choices[0].logprobs is None
    assert all(chunk.choices[0].logprobs is None for chunk in chunks(given))


def test_a_stream_has_the_log_probs_of_a_turn_of_calls_alone():
    (part,) = [chunk.choices[0] for chunk in chunks(answer("", [LOOK]), logprobs=True) if chunk.choices[0].logprobs]
    assert [one.logprob for one in part.logprobs.content] == [-0.5, -1.0, -1.5] and part.delta.content == ""
