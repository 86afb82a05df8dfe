"""Messages and tools of a request in the one form that is recorded, rendered and compared.

`message_key` says when two messages are the same: by role, content, calls (id, name and the arguments' values), and the
call that a result answers. What clients add beside that (`refusal`, `annotations`, nulls) says nothing to the model.
"""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.chat.call_json import CallError, check_name, read_call_arguments
from pipeline.chat.format import ChatMessage
from pipeline.endpoint.refusal import refuse
from pipeline.wording import shown

# Role of a request -> ours: no chat template knows developers.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id")
# What clients copy from answers into the conversation; none of it was read or written by the model.
PASSED_OVER = ("refusal", "annotations", "parsed", "id", "headway")


def read_messages(value: Any) -> list[ChatMessage]:
    """`messages`, in order. Raises Refusal, which names the message and its field."""
    if not isinstance(value, list) or not value:
        raise refuse("messages", f"messages is {shown(value)}; it is a list of at least one message.")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def read_tools(value: Any) -> list[dict[str, Any]]:
    """`tools`: the schemas of functions, as chat templates take them."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse("tools", f"tools is {shown(value)}; it is a list of functions.")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def message_key(message: Mapping[str, Any]) -> str:
    """Equal for messages that say the same."""
    calls = [
        [call.get("id"), call["function"]["name"], _plain_numbers(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    said = [message["role"], message["content"], message.get("name"), message.get("tool_call_id"), calls]
    return json.dumps(said, sort_keys=True)


def _message(message: Any, where: str) -> ChatMessage:
    if not isinstance(message, dict) or message.get("role") not in list(ROLES):
        raise refuse(where, f"{where} is {shown(message)}; it has a role, one of {', '.join(ROLES)}.")
    for key, value in message.items():
        if value not in (None, []) and key not in KNOWN and key not in PASSED_OVER:
            raise refuse(f"{where}.{key}", f"{where} has {key}, which isn't supported. Leave it out.", "unsupported")
    role = ROLES[message["role"]]
    made: ChatMessage = {"role": role, "content": _text(message.get("content"), where, may_lack=role == "assistant")}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise refuse(f"{where}.{key}", f"{where}.{key} is {shown(message[key])}; it is a text.")
            made[key] = message[key]
    if role == "tool" and "tool_call_id" not in made:
        raise refuse(f"{where}.tool_call_id", f"{where} is a tool's result; its tool_call_id names the call.")
    if message.get("tool_calls"):
        if role != "assistant":
            raise refuse(f"{where}.tool_calls", f"{where} has tool_calls, which only an assistant's message has.")
        made["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return made


def _text(content: Any, where: str, *, may_lack: bool) -> str:
    if content is None and may_lack:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        for index, part in enumerate(content):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise refuse(
                    f"{where}.content[{index}]",
                    f"{where}.content[{index}] is {shown(part)}; the model reads text: "
                    '{"type": "text", "text": ...}.',
                    "unsupported",
                )
        return "".join(part["text"] for part in content)
    raise refuse(f"{where}.content", f"{where}.content is {shown(content)}; it is a text, or a list of text parts.")


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise refuse(where, f"{where} is {shown(calls)}; it is a list of calls.")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise refuse(
            where,
            f'{where} is {shown(call)}; a call is {{"id": ..., "type": "function", "function": {{"name": ..., '
            '"arguments": ...}}.',
        )
    try:
        name = check_name(function.get("name"))
        arguments = read_call_arguments(function.get("arguments"), name)
    except CallError as error:
        raise refuse(f"{where}.function", f"{where}.function can't be read: {error}.") from None
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise refuse(
            where, f'{where} is {shown(tool)}; it is {{"type": "function", "function": {{...}}}}.', "unsupported"
        )
    try:
        check_name(function.get("name"))
    except CallError as error:
        raise refuse(f"{where}.function.name", f"{where} can't be offered: {error}.") from None
    if not isinstance(function.get("parameters", {}), dict | None):
        raise refuse(
            f"{where}.function.parameters",
            f"{where}.function.parameters is {shown(function['parameters'])}; it is a JSON schema.",
        )
    if function.get("strict") not in (None, True, False):
        raise refuse(
            f"{where}.function.strict", f"{where}.function.strict is {shown(function['strict'])}; it is true or false."
        )
    # `strict`, which clients' helpers always send, promises nothing here: a model learns from its own arguments only if
    # nobody corrects them.
    kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
    for key, value in (("description", ""), ("parameters", {"type": "object"})):  # templates read all three
        kept.setdefault(key, value)  # behind the others: they write the keys in the order that the model is shown
    return {"type": "function", "function": kept}


def _plain_numbers(value: Any) -> Any:
    """1.0 written as 1: clients in other languages know one kind of number only."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
