"""Conversations in the form that a model's template takes: what it can't render is written in a way that it can.

What a template can do is tried out on a small conversation when it is loaded; its source is not searched for words.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.chat.call_json import CallError, read_call_arguments
from pipeline.chat.control_text import TextBreaker
from pipeline.chat.format import ChatMessage
from pipeline.chat.template import ChatTemplate
from pipeline.chat.tool_formats import describe, find_tool_format
from pipeline.errors import TemplateError

Tools = Sequence[Mapping[str, Any]]

_INTERNAL = ("cut",)  # keys of messages that are no template's business
_SYSTEM, _USER, _MODEL, _RESULT, _CALL, _TOOL = (
    f"probe{what}" for what in ("sys", "usr", "mdl", "res", "call", "tool")
)
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "none",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "none"}},
            "required": ["key"],
        },
    },
}


class Abilities(NamedTuple):
    """What a template renders: system messages, tools' schemas, calls of assistant messages, messages of role tool."""

    system: bool
    tools: bool
    calls: bool
    results: bool


class Way(NamedTuple):
    """How a conversation is put to a template that may refuse others: each field departs from what was said.

    calls_as_text: calls are written into the content, in the model's own form. calls_for_results: a result whose call
    could not be read gets one with its name and no arguments. joined: a user message behind a tool's result or another
    user message becomes part of that.
    """

    calls_as_text: bool = False
    calls_for_results: bool = False
    joined: bool = False


def probe(template: ChatTemplate) -> tuple[Abilities, str]:
    """What the template can do, and how it writes a user's question and an answer. TemplateError if not even that."""

    def shows(what: str, messages: list[ChatMessage], tools: Tools = ()) -> bool:
        try:
            return what in template.render(messages, tools, False)
        except TemplateError:
            return False

    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _MODEL}
    function = {"name": _CALL, "arguments": {"key": "value"}}
    call = {"role": "assistant", "content": "", "tool_calls": [_call("call00001", function)]}
    result = {"role": "tool", "name": _CALL, "tool_call_id": "call00001", "content": _RESULT}
    abilities = Abilities(
        system=shows(_SYSTEM, [{"role": "system", "content": _SYSTEM}, user]),
        tools=shows(_TOOL, [user], [_PROBE_TOOL]),
        calls=shows(_CALL, [user, call], [_PROBE_TOOL]) or shows(_CALL, [user, call]),
        results=shows(_RESULT, [user, call, result], [_PROBE_TOOL]) or shows(_RESULT, [user, call, result]),
    )
    template.render([user], (), True)
    written = template.render([user, answer], (), False)
    if _MODEL not in written:
        raise TemplateError("The chat template leaves out what the model said. It can't be used for conversations.")
    return abilities, written[written.rindex(_MODEL) + len(_MODEL) :]


class Conversation:
    """Puts messages and tools into a template's form, each text guarded against control tokens.

    others: breaks all control tokens, in what users, tools and systems say and in calls. own: breaks those that make up
    a conversation, in what the model said; its other markup (`<think>`, `<tool_call>`) stays its own.
    """

    def __init__(self, abilities: Abilities, others: TextBreaker, own: TextBreaker, tool_format: str) -> None:
        self._can = abilities
        self._others, self._own = others, own
        self._tool_format = tool_format

    def ways(self, messages: Sequence[ChatMessage]) -> list[Way]:
        """In the order in which they are tried."""
        called = any(message.get("tool_calls") for message in messages)
        answered = with_calls_for_results(messages) != list(messages)
        roles = [message["role"] for message in messages]
        joins = any(pair in (("tool", "user"), ("user", "user")) for pair in zip(roles, roles[1:], strict=False))
        text = not self._can.calls
        ways = [Way(text)]
        ways += [Way(calls_for_results=True)] if answered and not text else []
        ways += [Way(calls_as_text=True)] if called and not text else []
        return ways + ([way._replace(joined=True) for way in ways] if joins else [])

    def prepared(
        self, messages: Sequence[ChatMessage], tools: Tools, way: Way
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(messages, tools) for the template. Raises TemplateError for arguments that are text but no JSON object."""
        if way.calls_for_results:
            messages = with_calls_for_results(messages)
        made = [self._message(message, index, way) for index, message in enumerate(messages)]
        if not self._can.results:
            made = _results_as_users(made)
        if way.joined:
            made = _joined(made)
        schemas = self._others.all_broken(list(tools))
        if schemas and not self._can.tools:
            made, schemas = self._described(made, describe(schemas, self._tool_format)), []
        return made, schemas

    def _message(self, message: ChatMessage, index: int, way: Way) -> dict[str, Any]:
        made = {key: value for key, value in message.items() if value is not None and key not in _INTERNAL}
        calls = [_readable(call, index, number) for number, call in enumerate(made.pop("tool_calls", ()))]
        calls = self._others.all_broken(calls)
        role, content = made.pop("role"), made.pop("content", "")
        if role == "assistant":
            text = self._own.broken(content)
            made = self._own.all_broken(made)
        else:
            text = self._others.broken(content, whole=True)
            made = self._others.all_broken(made)
        if calls and way.calls_as_text:
            written = find_tool_format(self._tool_format).write([call["function"] for call in calls])
            text, calls = f"{text}\n{written}" if text else written, []
        return {"role": role, "content": text, **made} | ({"tool_calls": calls} if calls else {})

    def _described(self, messages: list[dict[str, Any]], description: str) -> list[dict[str, Any]]:
        """With the tools told in the system message, or at the start of the first user message where there is none."""
        role = "system" if self._can.system else "user"
        for index, message in enumerate(messages):
            if message["role"] == role:
                parts = (message["content"], description) if role == "system" else (description, message["content"])
                changed = message | {"content": "\n\n".join(part for part in parts if part)}
                return [*messages[:index], changed, *messages[index + 1 :]]
        return [{"role": role, "content": description}, *messages]


def _call(call_id: str, function: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": dict(function)}


def _readable(call: Mapping[str, Any], message: int, number: int) -> dict[str, Any]:
    """The call with its arguments as an object: as JSON text they would be quoted a second time."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = read_call_arguments(arguments, "")
        except CallError as error:
            raise TemplateError(
                f"In message {message} of a conversation, call {number} of {function.get('name')!r:.80} can't be "
                f"rendered: {error}. Give the arguments as an object, or as the JSON text of one."
            ) from None
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def with_calls_for_results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages, in which each result that names a call has one before it."""
    made: list[ChatMessage] = []
    last = None  # the assistant message whose results follow
    for message in messages:
        if message["role"] == "assistant":
            last = len(made)
        elif message["role"] != "tool":
            last = None
        elif last is not None:
            calls, call_id = made[last].get("tool_calls") or [], message.get("tool_call_id")
            if call_id is not None and call_id not in [call.get("id") for call in calls]:
                added = _call(call_id, {"name": message.get("name") or "unreadable", "arguments": {}})
                made[last] = {**made[last], "tool_calls": [*calls, added]}
        made.append(message)
    return made


def _results_as_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that follow each other become one user message, each between tags."""
    made: list[dict[str, Any]] = []
    follows = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows:
                made[-1]["content"] += f"\n{text}"
            else:
                made.append({"role": "user", "content": text})
        else:
            made.append(message)
        follows = message["role"] == "tool"
    return made


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user" and made and made[-1]["role"] in ("tool", "user"):
            made[-1] = made[-1] | {"content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return made
