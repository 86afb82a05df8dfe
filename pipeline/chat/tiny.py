"""The chat formats of `model="tiny"`: one id per word of a closed vocabulary."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from pipeline.chat.format import ChatMessage, ModelTurn, ParsedTurn, Rendered
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.wording import shown

START = "<start>"  # opens a conversation that has no other markup
END = "<end>"  # ends each turn of the model
CUT = "<cut>"  # stands for the rest of a tool's result that was too long
MODEL = "<model>"  # from here on the model writes

_WORD = re.compile(r"\S+")

# A rendered piece is remembered; when there are too many different ones, all are forgotten and made again.
MAX_REMEMBERED = 8192


def no_calls(words: list[str]) -> list[dict[str, Any]]:
    """For tasks without tools: the environment reads the turn's text."""
    return []


FindCalls = Callable[[list[str]], list[dict[str, Any]]]


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.split() == [value]


class TinyChat:
    """The format of `model="tiny"`: one id per word, words separated by white space, a closed vocabulary.

    `words` are the task's own; `find_calls` reads the tool calls out of a turn's words. A message is its role's marker
    (`<user>`, `<tool>`, …) and its words. Tool schemas are not rendered: such a model learns its one tool by doing.
    """

    MARKERS = {"system": "<system>", "user": "<user>", "tool": "<tool>", "assistant": MODEL}
    SPECIAL: tuple[str, ...] = (END, *MARKERS.values(), CUT)  # the words that no message may hold

    def __init__(self, words: Sequence[str], find_calls: FindCalls = no_calls) -> None:
        if isinstance(words, str) or not isinstance(words, Sequence) or not all(map(_is_word, words)):
            raise ConfigTypeError(
                f"The tiny vocabulary is {shown(words)}. It is a list of words, each a text without white space. "
                "Correct it."
            )
        vocabulary = [*self.SPECIAL, *words]
        ids = {word: index for index, word in enumerate(vocabulary)}
        if len(ids) != len(vocabulary):
            repeated = sorted({word for word in vocabulary if vocabulary.count(word) > 1})
            raise ConfigError(
                f"The tiny vocabulary holds {', '.join(repeated)} more than once. Words are unique. Remove one."
            )
        self._words = vocabulary
        self._ids = ids
        self._find_calls = find_calls
        # No unknown word: the tokenizer then raises rather than losing what was said.
        self._tokenizer = Tokenizer(WordLevel(ids, unk_token=END + END))
        self._tokenizer.pre_tokenizer = WhitespaceSplit()
        self._messages: dict[tuple[str, str], tuple[int, ...]] = {}
        self._turns: dict[tuple[int, ...], ParsedTurn] = {}

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._ids[END],)

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids.extend(self._message(message))
        ids.append(self._ids[MODEL])
        return ids

    def render_reply(
        self,
        history: Sequence[ChatMessage],
        turn: ModelTurn,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Rendered:
        end = self._ids[END]
        ids = [] if len(turn.ids) and turn.ids[-1] == end else [end]
        for message in messages:
            ids.extend(self._message(message))
        ids.append(self._ids[MODEL])
        return Rendered(ids)

    def parse_turn(self, turn_ids: Sequence[int]) -> ParsedTurn:
        key = tuple(turn_ids)
        parsed = self._turns.get(key)
        if parsed is None:
            words = [self._words[index] for index in key]
            if words and words[-1] == END:
                words.pop()
            if len(self._turns) >= MAX_REMEMBERED:
                self._turns.clear()
            parsed = self._turns[key] = ParsedTurn(" ".join(words), self._find_calls(words))
        return parsed

    def cut(self, text: str, max_tokens: int, already: bool) -> str:
        self._check_words(text)
        words = list(islice(_WORD.finditer(text), max_tokens + 1))
        kept = text if len(words) <= max_tokens else text[: words[max_tokens - 1].end()]
        return f"{kept} {self._cut_word()}" if already or len(kept) < len(text) else text

    def _cut_word(self) -> str:
        return CUT

    def decode(self, ids: Sequence[int]) -> str:
        """The words of any ids, markers included."""
        return " ".join(self._words[index] for index in ids)

    def _message(self, message: ChatMessage) -> tuple[int, ...]:
        key = (message["role"], message["content"])
        ids = self._messages.get(key)
        if ids is None:
            if len(self._messages) >= MAX_REMEMBERED:
                self._messages.clear()
            ids = self._messages[key] = self._render(*key)
        return ids

    def _render(self, role: str, content: str) -> tuple[int, ...]:
        ids = (self._ids[self.MARKERS[role]], *self._encode(content))
        return (*ids, self._ids[END]) if role == "assistant" else ids

    def _encode(self, text: str) -> list[int]:
        self._check_words(text)
        return self._tokenizer.encode(text).ids

    def _check_words(self, text: str) -> None:
        for word in text.split():
            if word not in self._ids:
                of = "" if word == text else f" of {text!r:.200}"
                raise ConfigError(
                    f"The word {shown(word)}{of} is not among the {len(self._words)} words of the tiny model's "
                    "vocabulary. Messages for it may hold only these. Add the word to the task's vocabulary."
                )


class TerseChat(TinyChat):
    """A tiny format without markup: a turn ends with one of `stop_words`, and answers follow bare.

    For worlds in which every word has one speaker. A model that starts from random weights must find out by trial what
    each id is for; the fewer ids stand between an answer and the next word, the sooner it does. `cut_word`, one of
    `words`, stands for the rest of a tool's result that was too long; without it such a result is an error.
    """

    SPECIAL = (START,)

    def __init__(
        self,
        words: Sequence[str],
        stop_words: Sequence[str],
        find_calls: FindCalls = no_calls,
        cut_word: str | None = None,
    ) -> None:
        super().__init__(words, find_calls)
        for name, given in (("stop_words", list(stop_words)), ("cut_word", [] if cut_word is None else [cut_word])):
            if unknown := [word for word in given if word not in self._ids]:
                raise ConfigError(
                    f"TerseChat.{name} has {shown(unknown[0])}, which is not among its words. Add it there."
                )
        self._stop_ids = tuple(self._ids[word] for word in stop_words)
        self._marker = cut_word

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return [self._ids[START], *self._bare(messages)]

    def render_reply(
        self,
        history: Sequence[ChatMessage],
        turn: ModelTurn,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Rendered:
        return Rendered(self._bare(messages))

    def _bare(self, messages: Sequence[ChatMessage]) -> list[int]:
        return [index for message in messages for index in self._message(message)]

    def _render(self, role: str, content: str) -> tuple[int, ...]:
        return tuple(self._encode(content))

    def _cut_word(self) -> str:
        if self._marker is None:
            raise ConfigError(
                "A tool's result is longer than Budget.tool_output_tokens, and this format has no word that says so. "
                "Give TerseChat a cut_word, raise the limit, or return less."
            )
        return self._marker
