"""The answer to a chat completion: one JSON object, or the chunks of a stream; both say the same.

Beside what OpenAI's protocol has, `headway` holds what is trained: the sampled ids, each with its policy version.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.chat.format import ModelTurn
from pipeline.endpoint.chat_request import ChatRequest

DONE = b"data: [DONE]\n\n"
UNREADABLE = "�"  # what decoding makes of bytes that are part of a character only


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the model as it was sampled: per id its log-prob and its version.

    stopped: a stop id ended it. prompt_tokens: its context; cached_tokens: those whose KV was there.
    """

    turn: ModelTurn
    stopped: bool
    logprobs: Sequence[float]
    versions: Sequence[int]
    prompt_tokens: int
    cached_tokens: int

    @property
    def finish_reason(self) -> str:
        """A turn that was cut may have whole calls: its message has them then."""
        if not self.stopped:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Those that can be read, as OpenAI writes them; the others stand in the text."""
        return [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            for call in self.turn.tool_calls
            if call.get("error") is None
        ]

    @property
    def content(self) -> str | None:
        """null beside calls without text, as OpenAI has it."""
        return self.turn.text or (None if self.calls else "")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all parts of one answer carry. created: seconds since 1970."""

    id: str
    created: int
    model: str

    def around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def completion(
    answer: Answer, request: ChatRequest, envelope: Envelope, text_of: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """text_of: the text of token ids."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls:
        message["tool_calls"] = answer.calls
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer, text_of) if request.logprobs else None,
    }
    whole = envelope.around("chat.completion", [choice])
    return whole | {"usage": _usage(answer), "headway": _sampled(answer)}


def stream(
    answer: Answer, request: ChatRequest, envelope: Envelope, text_of: Callable[[Sequence[int]], str]
) -> Iterator[bytes]:
    """Server-sent events: the role, the content with its log-probs, each call, the end, the usage if asked for."""

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} | more
        return envelope.around("chat.completion.chunk", [choice])

    yield event(chunk({"role": "assistant", "content": ""}))
    logprobs = _logprobs(answer, text_of) if request.logprobs else None
    if answer.turn.text or logprobs is not None:
        yield event(chunk({"content": answer.turn.text}, logprobs=logprobs))
    for index, call in enumerate(answer.calls):
        yield event(chunk({"tool_calls": [{"index": index} | call]}))
    yield event(chunk({}, finish_reason=answer.finish_reason) | {"headway": _sampled(answer)})
    if request.include_usage:
        yield event(envelope.around("chat.completion.chunk", []) | {"usage": _usage(answer)})
    yield DONE


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _usage(answer: Answer) -> dict[str, Any]:
    sampled = len(answer.turn.ids)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _sampled(answer: Answer) -> dict[str, Any]:
    return {"token_ids": list(answer.turn.ids), "versions": list(answer.versions)}


def _logprobs(answer: Answer, text_of: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Of every sampled id, the one that ended the turn too. bytes: null for an id that is part of a character."""
    content = []
    for token, logprob in zip(answer.turn.ids, answer.logprobs, strict=True):
        text = text_of([token])
        raw = None if UNREADABLE in text else list(text.encode())
        content.append({"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []})
    return {"content": content, "refusal": None}
