"""A request to /v1/chat/completions, checked: what it asks for, or a `Refusal` that names the field.

A field is served, or known to change nothing, or refused unless it says what holds anyway: sampling is the run's, so
that what is trained is what was sampled, and every log-prob is that of the run's temperature.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.chat.format import ChatMessage
from pipeline.config_checks import MAX_COUNT
from pipeline.endpoint.messages import read_messages, read_tools
from pipeline.endpoint.refusal import NOT_FOUND, Refusal, refuse
from pipeline.wording import shown

# Beside the fields that are read below: those that change nothing about what is sampled.
WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user")
# Those that may say only what holds anyway (null aside).
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "stop": ([],),
    "store": (False,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
READ = ("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs")
SAMPLING = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True)
class Served:
    """What holds for all requests of a run."""

    model: str
    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """turn_cap: most tokens of the answer; None: as the run's budget says."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    turn_cap: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False


def read_chat_request(body: dict[str, Any], served: Served) -> ChatRequest:
    given = {name: value for name, value in body.items() if value is not None}
    _check_model(given.get("model"), served.model)
    for name, value in given.items():
        _check_field(name, value, served)
    if given.get("tool_choice") == "none" and given.get("tools"):
        raise refuse("tool_choice", 'tool_choice is "none", but tools are given; leave one of them out.', "unsupported")
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise refuse("stream_options", f"stream_options is {shown(options)}; it is an object.")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise refuse("stream_options", f"stream_options has {name!r:.80}, which isn't supported.", "unsupported")
    stream = _flag(given, "stream")
    if options and not stream:
        raise refuse("stream_options", "stream_options is given, but stream is not true; leave one of them out.")
    return ChatRequest(
        messages=read_messages(given.get("messages")),
        tools=read_tools(given.get("tools")),
        turn_cap=_turn_cap(given),
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        logprobs=_flag(given, "logprobs"),
    )


def _check_model(model: Any, name: str) -> None:
    if model != name:
        raise Refusal(
            NOT_FOUND,
            f"The model is {shown(model)}, but this endpoint serves {name!r}; ask for that one.",
            code="model_not_found",
            param="model",
        )


def _check_field(name: str, value: Any, served: Served) -> None:
    if name in READ or name in WITHOUT_EFFECT:
        return
    if name in SAMPLING:
        of_run = getattr(served, name)
        if not _same(value, of_run):
            raise refuse(
                name,
                f"{name} is {shown(value)}, but this run samples with {name}={of_run:g}, and trains on what it "
                f"sampled; leave {name} out, or give it to the run.",
                "unsupported",
            )
    elif name == "tool_choice" and value == "none":
        return
    elif name not in FIXED:
        raise refuse(name, f"{name!r:.80} is {shown(value)}, but isn't supported. Leave it out.", "unsupported")
    elif not any(_same(value, allowed) for allowed in FIXED[name]):
        raise refuse(
            name,
            f"{name} is {shown(value)}, but only {FIXED[name][0]!r} is supported. Leave it out.",
            "unsupported",
        )


def _same(value: Any, allowed: Any) -> bool:
    """True is no number here."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise refuse(name, f"{name} is {shown(value)}; it is true or false.")
    return bool(value)


def _turn_cap(given: dict[str, Any]) -> int | None:
    """max_completion_tokens, or its old name."""
    caps = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    for name, cap in caps.items():
        if type(cap) is not int or not 1 <= cap <= MAX_COUNT:
            raise refuse(name, f"{name} is {shown(cap)}; it counts tokens, from 1 to {MAX_COUNT:,}.")
    if len(set(caps.values())) > 1:
        raise refuse("max_tokens", "max_tokens and max_completion_tokens name one limit, and differ; give one of them.")
    return next(iter(caps.values()), None)
