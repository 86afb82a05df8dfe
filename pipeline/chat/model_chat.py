"""The chat format of a model directory: its own template and tokenizer, with each sampled id kept as it was.

What follows a turn is found by comparison: the conversation rendered to the turn's end and rendered to the next turn's
opening. Where both write the same up to the end of the turn, the rest of the second is what follows, and only that is
encoded. Where they differ, the template writes the past in another way now, and a new conditioning run begins.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.chat.control_text import ControlText, TextBreaker, restore
from pipeline.chat.conversation import Conversation, Tools, Way, probe, with_calls_for_results
from pipeline.chat.format import ChatMessage, ModelTurn, ParsedTurn, Rendered, assistant_message, cut_text
from pipeline.chat.template import ChatTemplate, read_template, special_tokens
from pipeline.chat.tokenizer_files import read_stop_ids, read_tokenizer
from pipeline.chat.tool_formats import FORMATS, detect, find_tool_format
from pipeline.errors import ConfigError, TemplateError

Result = TypeVar("Result")

CUT_MARK = "\n[... the rest is cut off]"

# Characters of conversations whose text or ids are remembered: the prompts of running groups, and what running
# trajectories render again as the start of what follows.
MAX_REMEMBERED = 16_000_000


class _Recent:
    """The values of the keys used last, up to a number of characters."""

    def __init__(self, max_chars: int) -> None:
        self._values: OrderedDict[str, Any] = OrderedDict()
        self._left = max_chars

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = make()
        self._left -= len(key)
        while self._left < 0 and len(self._values) > 1:
            self._left += len(self._values.popitem(last=False)[0])
        return value


class ModelChat:
    """A ChatFormat. `unused_ids`: those below vocab_size that no token has.

    stop_ids: of the model's files; the token with which the template ends the model's turns joins them. tool_format: a
    name, or "auto" for what the template suggests. Raises ConfigError when no id ends a turn.
    """

    def __init__(
        self,
        text: ControlText,
        template: ChatTemplate,
        *,
        stop_ids: Sequence[int] = (),
        special_tokens: Sequence[str] = (),
        tool_format: str = "auto",
        place: str,
    ) -> None:
        self._text, self._template, self._place = text, template, place
        try:
            abilities, ending = probe(template)
        except TemplateError as error:
            raise ConfigError(f"{error} It can't render a question and an answer. Correct it.") from None
        # Where the template breaks a turn of the model off, that ends it; the model may end it with other tokens too.
        end = next(text.find_all(ending), None)
        ids = {index for index in text.plain.get_vocab(with_added_tokens=True).values()}
        stops = {index for index in stop_ids if index in ids} | ({text.controls[end[0]]} if end else set())
        if not stops:
            raise ConfigError(
                f"No token of {place} ends a turn: neither generation_config.json nor tokenizer_config.json names an "
                'end of text, and the chat template writes no token behind an answer. Set "eos_token_id" in '
                "generation_config.json."
            )
        self.stop_ids: tuple[int, ...] = tuple(sorted(stops))
        self.vocab_size = max(ids) + 1
        self.unused_ids = tuple(sorted(set(range(self.vocab_size)) - ids))
        texts = {index: name for name, index in text.controls.items()}
        self._stop_texts = {index: texts[index] for index in self.stop_ids if index in texts}
        told = detect(template.source) if abilities.tools else "hermes"  # as `describe` tells it
        self._is_foreign = tool_format == "auto" and told is None  # calls come in a form that nobody reads
        if tool_format == "auto":
            tool_format = told or "hermes"
        self._tool_format = find_tool_format(tool_format)
        self._structure = {*self._stop_texts.values(), *(name for name in special_tokens if name in text.controls)}
        self._structure |= self._openings()
        self._conversation = Conversation(
            abilities, TextBreaker(text.controls), TextBreaker(self._structure), tool_format
        )
        self._rendered, self._prompts = _Recent(MAX_REMEMBERED), _Recent(MAX_REMEMBERED)

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Tools) -> list[int]:
        """No token is put before what the template writes: it writes the token that begins a text, or none does.

        Raises TemplateError when the template renders the conversation in no way, or asks for calls in a form that
        can't be read.
        """
        if tools and self._is_foreign:
            raise TemplateError(
                f"The chat template of {self._place} asks for tool calls in a form that is none of "
                f"{', '.join(FORMATS)}, so they can't be read. Name one with --tool-format if the model writes it too."
            )

        def render(way: Way) -> list[int]:
            rendered = self._render(messages, tools, way, True)
            return self._prompts.get(rendered, lambda: self._text.encode(rendered))

        return list(self._first_way(messages, render))

    def render_reply(
        self, history: Sequence[ChatMessage], turn: ModelTurn, messages: Sequence[ChatMessage], tools: Tools
    ) -> Rendered:
        """As ChatFormat says. Raises TemplateError when the template renders the conversation in no way."""
        spoken = assistant_message(turn.text, turn.tool_calls)
        raw = assistant_message(self._decoded(turn.ids), [])
        malformed = any(call.get("error") is not None for call in turn.tool_calls)

        def render(way: Way) -> Rendered:
            said = raw if way.calls_as_text or (malformed and not way.calls_for_results) else spoken
            if way.calls_for_results:
                said = with_calls_for_results([spoken, *messages])[0]
            before = self._render(history, tools, way, True)
            whole = self._render([*history, said, *messages], tools, way, True)
            place = self._find_turn(before, whole, lambda: self._render([*history, said], tools, way, False))
            if place is None or not (way.calls_for_results or self._shows(whole[slice(*place)], said)):
                return Rendered(self._text.encode(whole), rewrites=True)
            return Rendered(self._encode_framing(whole[place[1] :], turn.ids))

        return self._first_way([*history, spoken, *messages], render)

    def parse_turn(self, turn_ids: Sequence[int]) -> ParsedTurn:
        return self._tool_format.parse(self._decoded(turn_ids))

    def cut(self, text: str, max_tokens: int, already: bool) -> str:
        """The marker counts as part of the tokens, unless it alone has more."""
        kept = cut_text(self._text.literal, text, max_tokens)
        if not already and len(kept) == len(text):
            return text
        room = max_tokens - self._num_tokens(CUT_MARK)
        while True:
            kept = cut_text(self._text.literal, kept, room) if room > 0 else ""
            if not kept or self._num_tokens(kept + CUT_MARK) <= max_tokens:
                return kept + CUT_MARK
            room -= 1

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids, control tokens included."""
        return self._text.plain.decode(list(ids), skip_special_tokens=False)

    def _decoded(self, turn_ids: Sequence[int]) -> str:
        """A turn's text without the token that ended it."""
        ids = list(turn_ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def _num_tokens(self, text: str) -> int:
        return len(self._text.literal.encode(text, add_special_tokens=False).ids)

    def _openings(self) -> set[str]:
        """The special tokens that the template writes around messages."""
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        written = self._template.render(messages, (), True)
        return {found[0] for found in self._text.find_all(written) if found[0] in self._text.special}

    def _first_way(self, messages: Sequence[ChatMessage], render: Callable[[Way], Result]) -> Result:
        """What `render` gives for the first way of the conversation that the template takes."""
        refused = None
        for way in self._conversation.ways(messages):
            try:
                return render(way)
            except TemplateError as error:
                refused = refused or error
        raise refused

    def _render(self, messages: Sequence[ChatMessage], tools: Tools, way: Way, opens: bool) -> str:
        """Text with marks. opens: with the opening of the model's turn, as it will be asked for again."""

        def render() -> str:
            return self._template.render(*self._conversation.prepared(messages, tools, way), opens)

        if not opens:
            return render()
        return self._rendered.get(json.dumps([way, tools, messages], ensure_ascii=False, default=str), render)

    def _find_turn(self, before: str, whole: str, ended: Callable[[], str]) -> tuple[int, int] | None:
        """Where in `whole` the model's turn begins and ends; None if `whole` does not go on from `before`.

        before: up to the turn; whole: from the start to the opening of the next turn; ended: to the end of this one.
        White space aside: an empty turn may go without the line break of the opening, and templates write some that
        depends on what follows (Hermes 3 behind a tool's result).
        """
        start = _place_after(before.rstrip(), whole)
        if start is None:
            return None
        end = self._end_in(whole, start)
        if end is not None:
            return start, end
        turn = ended().rstrip()  # no token ends a turn here, so what more there is in `whole` comes behind it
        end, start_in_turn = _place_after(turn, whole), _place_after(before.rstrip(), turn)
        goes_on = end is not None and start_in_turn is not None and self._end_in(turn, start_in_turn) is None
        return (start, end) if goes_on else None

    def _end_in(self, rendered: str, start: int) -> int | None:
        """Where a token ends the turn that begins at `start`. What anyone said has no such token, nor one that opens a
        turn; so the first one is the template's, and it is an end, or the turn has none.
        """
        found = next((found for found in self._text.find_all(rendered, start) if found[0] in self._structure), None)
        return found.start() if found is not None and found[0] in self._stop_texts.values() else None

    def _shows(self, body: str, said: ChatMessage) -> bool:
        """Whether a rendered turn is what the model said, white space and the form of calls aside. A template that
        leaves some of it out, reasoning above all, or adds some, has rewritten it.
        """
        shown, calls = _squeezed(restore(body)), said.get("tool_calls", ())
        content = _squeezed(said["content"])
        if not calls:
            return shown == content
        return content in shown and all(_squeezed(call["function"]["name"]) in shown for call in calls)

    def _encode_framing(self, framing: str, turn_ids: Sequence[int]) -> list[int]:
        """The ids of what follows a turn, without the end that the model wrote itself.

        It is encoded behind the token that it stands behind, so that tokenizers which treat the start of a text, or
        white space around a token, in their own way do what they do in the whole.
        """
        sampled = turn_ids[-1] if turn_ids and turn_ids[-1] in self.stop_ids else None
        written = next((text for text in self._stop_texts.values() if framing.startswith(text)), None)
        rest = framing.removeprefix(written or "")
        if sampled is None and written is not None:
            return self._text.encode(framing)
        behind = self._stop_texts.get(self.stop_ids[0] if sampled is None else sampled)
        return self._text.encode(rest) if behind is None else self._text.encode(behind + rest)[1:]


def load_chat(
    directory: Path | str, *, options: Mapping[str, Any] | None = None, tool_format: str = "auto"
) -> ModelChat:
    """options: variables for the chat template, such as `enable_thinking`. Raises ConfigError for what is missing."""
    directory = Path(directory)
    template = read_template(directory, options or {})
    specials = special_tokens(directory)
    text = ControlText(read_tokenizer(directory), str(directory))
    named = specials.get("eos_token")
    eos = [] if named is None else [text.plain.token_to_id(named)]
    return ModelChat(
        text,
        template,
        stop_ids=[index for index in (*read_stop_ids(directory), *eos) if index is not None],
        special_tokens=list(specials.values()),
        tool_format=tool_format,
        place=str(directory),
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _place_after(start: str, text: str) -> int | None:
    """Where in `text` that ends which it starts with, white space aside; None if it starts otherwise."""
    if text.startswith(start):
        return len(start)
    left = _squeezed(start)
    if not _squeezed(text).startswith(left):
        return None
    num_left = len(left)
    for word in re.finditer(r"\S+", text):
        if num_left <= len(word[0]):
            return word.start() + num_left
        num_left -= len(word[0])
    return None
