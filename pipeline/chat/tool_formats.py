"""Tool calls in the text of a turn, in the forms that model families write them.

`find_tool_format(name).parse(text)` never raises, whatever a model wrote, and takes time linear in the text. A call
that can't be read comes out with an `error`: it is never run, the model is told what is wrong and the right form, and
its raw text stays in the turn's text. What a model thinks (up to `</think>`) is text, never a call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pipeline.chat.call_json import CallError, check_name, read_call, read_call_arguments, scan_value, short, skip_space
from pipeline.chat.format import ParsedTurn
from pipeline.errors import ConfigError

# Calls beyond these are refused: a model that repeats itself must not start thousands of tools. It also bounds the
# work, as each call may be searched for through the whole text.
MAX_CALLS = 64

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

Calls = list[dict[str, Any]]


def without_reasoning(text: str) -> str:
    """What a turn says behind its reasoning; nothing if that has no end."""
    for begin, end in REASONING:
        if text.startswith(begin, skip_space(text, 0)) or end in text:
            text = text.partition(end)[2]
    return text


class ToolFormat(Protocol):
    """How a model family writes tool calls. `form` is a call as the model should have written it."""

    name: str
    form: str

    def parse(self, text: str) -> ParsedTurn:
        """The calls in order, and the text around them, reasoning and malformed calls included.

        text: the turn with its control tokens as text and without its stop token.
        """

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """`parse` the other way round, for templates that write no calls themselves. calls: each name and arguments."""


class _Blocks:
    """Goes through the blocks of calls in a turn; a family says where the next begins, and reads it."""

    name: str
    form: str
    opens: str  # the text that begins a block

    def find(self, text: str, position: int) -> int:
        """Where the next block begins, -1 for none."""
        return text.find(self.opens, position)

    def read(self, text: str, start: int) -> tuple[Calls, int]:
        """The calls of the block at `start`, and where it ends. Raises CallError."""
        raise NotImplementedError

    def skip(self, text: str, start: int) -> int:
        """Where a block ends that can't be read."""
        found = text.find(self.opens, start + 1)
        return len(text) if found < 0 else found

    def parse(self, text: str) -> ParsedTurn:
        position = self._reasoning_end(text)
        calls: Calls = []
        kept = [text[:position]]
        while (start := self.find(text, position)) >= 0:
            kept.append(text[position:start])
            try:
                found, end = self.read(text, start)
                if len(calls) + len(found) > MAX_CALLS:
                    raise CallError(f"it is one of more than {MAX_CALLS} calls in a turn")
            except CallError as error:
                found = [self.malformed(error)]
                end = self.skip(text, start) if len(calls) < MAX_CALLS else len(text)
            if found and all(call["error"] is not None for call in found):
                kept.append(text[start:end])
            calls += found
            position = end
        if not calls and len(kept) == 1:
            return ParsedTurn(text, [])
        kept.append(text[position:])
        return ParsedTurn("".join(kept).strip(), calls)

    def _reasoning_end(self, text: str) -> int:
        """Where the reasoning that a turn begins with ends; 0 if there is none.

        Templates may have opened it in the prompt, so its start need not be in the turn. An end within a call that can
        be read ends no reasoning. Reasoning without an end is all of the turn.
        """
        for begin, end in REASONING:
            found = text.find(end)
            if text.startswith(begin, skip_space(text, 0)):
                return len(text) if found < 0 else found + len(end)
            if found >= 0 and not self._in_a_call(text, found):
                return found + len(end)
        return 0

    def _in_a_call(self, text: str, position: int) -> bool:
        """Whether `position` is within a block that can be read, and which only such blocks come before."""
        start = self.find(text, 0)
        for _ in range(MAX_CALLS):
            if not 0 <= start < position:
                return False
            try:
                end = self.read(text, start)[1]
            except CallError:
                return False
            if end > position:
                return True
            start = self.find(text, end)
        return False

    def malformed(self, error: CallError) -> dict[str, Any]:
        """The call that stands for one that can't be run."""
        return {"name": error.name, "arguments": {}, "error": f"this call was not run: {error}. Write {self.form}"}

    def calls_of(self, items: Sequence[Any]) -> Calls:
        """One call per decoded item; those that are none carry their error."""
        calls = []
        for item in items:
            try:
                calls.append(read_call(item))
            except CallError as error:
                calls.append(self.malformed(error))
        return calls


class HermesFormat(_Blocks):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one call per block (Hermes, Qwen2.5, Qwen3, SmolLM3).

    A block without its end is malformed, also when its JSON is whole: the turn may have been cut there.
    """

    name = "hermes"
    form = '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call>'
    opens = "<tool_call>"
    closes = "</tool_call>"

    def read(self, text: str, start: int) -> tuple[Calls, int]:
        value, end = scan_value(text, start + len(self.opens))
        closing = skip_space(text, end)
        if not text.startswith(self.closes, closing):
            follows = f"{short(text[closing : closing + 20])} follows its JSON" if closing < len(text) else "it ends"
            raise CallError(f"{follows} without {self.closes}", _name_in(value))
        return self.calls_of(self.items(value)), closing + len(self.closes)

    def items(self, value: Any) -> list[Any]:
        return [value]

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(f"{self.opens}\n{written(call)}\n{self.closes}" for call in calls)

    def skip(self, text: str, start: int) -> int:
        after = start + len(self.opens)
        following = super().skip(text, start)
        closing = text.find(self.closes, after, following)
        return following if closing < 0 else closing + len(self.closes)


class SmolLMFormat(HermesFormat):
    """`<tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>` (SmolLM2): a list, empty for no call, or one call."""

    name = "smollm"
    form = '<tool_call>[{"name": "NAME", "arguments": {…}}]</tool_call>'

    def items(self, value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return f"{self.opens}[{', '.join(map(written, calls))}]{self.closes}"


class Llama3Format(_Blocks):
    """`{"name": …, "parameters": {…}}` as the whole turn, or after `<|python_tag|>`; more may follow, with `;` between.

    After the tag also `NAME.call(key=value, …)`, each value written as JSON. Python code after the tag is not run, and
    a turn that begins with any other JSON is text.
    """

    name = "llama3"
    form = '{"name": "NAME", "parameters": {…}}'
    opens = "<|python_tag|>"
    _BARE = re.compile(r'[\s;]*\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
    _CALL = re.compile(r"([\w.-]{1,128})\.call\(")
    _KEY = re.compile(r"\s*(\w{1,128})\s*=")
    _GAP = re.compile(r"[\s;]*")

    def find(self, text: str, position: int) -> int:
        return position if self._BARE.match(text, position) else super().find(text, position)

    def read(self, text: str, start: int) -> tuple[Calls, int]:
        tagged = text.startswith(self.opens, start)
        begin = self._GAP.match(text, start + len(self.opens) if tagged else start).end()
        if tagged and (call := self._CALL.match(text, begin)):
            return self._read_call(text, call)
        if tagged and not text.startswith("{", begin):
            raise CallError(f"it begins with {short(text[begin : begin + 20])}, not with a JSON object")
        value, end = scan_value(text, begin)
        return self.calls_of([value]), end

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "; ".join(written(call, "parameters") for call in calls)

    def _read_call(self, text: str, call: re.Match) -> tuple[Calls, int]:
        """The call whose name and opening bracket are `call`."""
        name, position, arguments = call[1], call.end(), {}
        closing = skip_space(text, position)
        while not (text.startswith(")", closing) and not arguments):
            key = self._KEY.match(text, position)
            if key is None or key[1] in arguments:
                what = "what follows is not key=value" if key is None else f"the key {key[1]} stands twice"
                raise CallError(f"in {name}.call(…) {what}", name)
            try:
                arguments[key[1]], end = scan_value(text, key.end())
            except CallError as error:
                raise CallError(f"in {name}.call(…) the value of {key[1]} is not JSON: {error}", name) from None
            closing = skip_space(text, end)
            if text.startswith(")", closing):
                break
            if not text.startswith(",", closing):
                raise CallError(f"{name}.call(…) is not closed", name)
            position = closing + 1
        return [{"name": name, "arguments": arguments, "error": None}], closing + 1


class MistralFormat(_Blocks):
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` per call, as newer models
    write it (with `[CALL_ID]…` before `[ARGS]`, or without both).
    """

    name = "mistral"
    form = '[TOOL_CALLS] [{"name": "NAME", "arguments": {…}}]'
    opens = "[TOOL_CALLS]"
    # Quantifiers give nothing back (`+` behind them), so no text takes more than linear time.
    _NAMED = re.compile(r'([^\s\[\]{}":,]{1,129}+)\s*+(?:\[CALL_ID\]\s*+\w{0,64}+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)')

    def read(self, text: str, start: int) -> tuple[Calls, int]:
        begin = skip_space(text, start + len(self.opens))
        if named := self._NAMED.match(text, begin):
            name = check_name(named[1])
            value, end = scan_value(text, named.end())
            return [{"name": name, "arguments": read_call_arguments(value, name), "error": None}], end
        value, end = scan_value(text, begin)
        return self.calls_of(value if isinstance(value, list) else [value]), end

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return f"{self.opens} [{', '.join(map(written, calls))}]"


FORMATS: dict[str, ToolFormat] = {
    kind.name: kind() for kind in (HermesFormat, SmolLMFormat, Llama3Format, MistralFormat)
}


def find_tool_format(name: str) -> ToolFormat:
    """Raises ConfigError for a name that is none."""
    if name not in FORMATS:
        raise ConfigError(f"The tool format is {name!r}; it must be one of {', '.join(FORMATS)}.")
    return FORMATS[name]


# Forms of other families that look like one of ours from afar: XML within <tool_call> (Qwen3-Coder, GLM).
_OTHER_FORMS = ("<function=", "<arg_key>")


def detect(template_source: str) -> str | None:
    """The name of the format in which a chat template that renders tools asks for calls; None for one that is not
    among them.
    """
    if "[TOOL_CALLS]" in template_source:
        return MistralFormat.name
    if any(form in template_source for form in _OTHER_FORMS):
        return None
    if "<tool_call>[" in template_source:
        return SmolLMFormat.name
    if "<tool_call>" in template_source:
        return HermesFormat.name
    if "<|python_tag|>" in template_source or "ipython" in template_source:
        return Llama3Format.name
    return None


def describe(tools: Sequence[Mapping[str, Any]], tool_format: str = HermesFormat.name) -> str:
    """The system text that tells a model its tools where its template does not, and how it calls them: as Qwen's
    templates do it, so that models read what many were trained on. Empty without tools.
    """
    if not tools:
        return ""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if tool_format == HermesFormat.name:
        how = (
            "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
    else:
        how = f"write its name and its arguments in this form:\n{find_tool_format(tool_format).form}"
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{schemas}\n</tools>\n\nFor each function call, {how}"
    )


def written(call: Mapping[str, Any], key: str = "arguments") -> str:
    """A call as JSON."""
    return json.dumps({"name": call["name"], key: call["arguments"]}, ensure_ascii=False)


def _name_in(value: Any) -> str:
    """The tool's name in a decoded call, for the record of its error; empty if there is none."""
    try:
        return check_name(value["name"]) if isinstance(value, dict) and "name" in value else ""
    except CallError:
        return ""
