"""What a chat format does: conversations to token ids, and a turn's ids back to text and tool calls.

A message is rendered once, when it arrives, and its ids are appended to the trajectory; sampled ids are never decoded
and encoded again. So what is trained is exactly what was sampled.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

ChatMessage = dict[str, Any]  # {"role": one of env.ROLES, "content": str}, in tool messages also "name"; never modified

# Tokens that may come of one more when a text ends within it: one of 128 spaces, say.
_SPLIT_TOKENS = 256


class ParsedTurn(NamedTuple):
    """A turn as the environment gets it: its text without the calls and without the stop token, and the calls in order.

    A call is `{"name", "arguments", "error"}`. One that can't be read has an error, a sentence for the model, and what
    stood in its place stays in the text.
    """

    text: str
    tool_calls: list[dict[str, Any]]


class ModelTurn(NamedTuple):
    """A turn that a reply follows. ids: as sampled, the stop token last if one was. Each call has an "id", too."""

    ids: Sequence[int]
    text: str
    tool_calls: Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """What follows a turn. rewrites: the format writes the conversation so far in another way now, as templates do that
    drop earlier reasoning; `tokens` are then the whole context from its start, and a new conditioning run begins.
    """

    tokens: list[int]
    rewrites: bool = False


class ChatFormat(Protocol):
    """How a model family writes conversations. Without state: a trajectory brings its own history."""

    @property
    def vocab_size(self) -> int:
        """Ids that messages may become; all are below it."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of which each ends a turn, itself the turn's last token."""

    def render_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation's start, up to where the model writes. tools: schemas of `@tool` functions."""

    def render_reply(
        self,
        history: Sequence[ChatMessage],
        turn: ModelTurn,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Rendered:
        """The ids that follow a turn: its end if the model did not write it, the messages, the next turn's opening.

        history: all messages before the turn. Changes nothing: a trajectory may ask twice, and use one answer.
        """

    def parse_turn(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """The text and the tool calls of a turn. Never raises, whatever the model wrote."""

    def cut(self, text: str, max_tokens: int, already: bool) -> str:
        """A tool's result of at most `max_tokens` tokens, with a visible marker behind it if it was cut, here or
        `already`.
        """


def assistant_message(text: str, tool_calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A turn in the form that chat templates take: its text, and those calls that could be read."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    readable = [call for call in tool_calls if call.get("error") is None]
    if readable:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in readable
        ]
    return message


def cut_text(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """As much of the start of `text` as has at most `max_tokens` tokens, in whole characters.

    Of a long text only as much is encoded as is sure to have more: a million characters take seconds.
    """
    enough = max_tokens + _SPLIT_TOKENS
    length = 4 * enough
    while True:
        encoding = tokenizer.encode(text[:length], add_special_tokens=False)
        if len(encoding.ids) > enough or length >= len(text):
            break
        length *= 4
    if len(encoding.ids) <= max_tokens:
        return text
    end, next_start = encoding.offsets[max_tokens - 1][1], encoding.offsets[max_tokens][0]
    return text[: min(end, next_start)]  # tokens that share a character overlap: none of it stays
