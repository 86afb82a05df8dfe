"""Which conversations of a rollout are recorded, and where their exact ids are.

A state is a conversation whose ids are known: up to where the model writes (a prompt), or up to the end of one of its
turns. A request that goes on from a state is given that state's ids; words of the model are never encoded again. Of
states that say the same (the model was asked twice, and answered alike) the last one counts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.chat.format import ChatMessage, ModelTurn, assistant_message
from pipeline.endpoint.messages import message_key


@dataclass(frozen=True, slots=True)
class State:
    """run, num_tokens: its ids are the first so many of that conditioning run. history: the messages before the turn;
    turn: None for a prompt, which has all its messages in the history.
    """

    run: int
    num_tokens: int
    history: list[ChatMessage]
    turn: ModelTurn | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes on: behind `state` with `messages`. state: None where nothing recorded is its start. digest:
    of the whole conversation, with its tools.
    """

    state: State | None
    messages: list[ChatMessage]
    digest: bytes


class RecordedStates:
    """Of one rollout. A conversation is known by a digest that is made message by message, so each is read once."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, State] = {}
        self._turns: dict[bytes, State] = {}

    def find(self, messages: list[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Place:
        """The whole of `messages` as a prompt that is recorded, else the longest start of it that ends with a turn."""
        digests = [_digest(json.dumps(list(tools), sort_keys=True).encode())]
        for message in messages:
            digests.append(_behind(digests[-1], message))
        if digests[-1] in self._prompts:
            return Place(self._prompts[digests[-1]], [], digests[-1])
        for number in range(len(messages), 0, -1):
            if digests[number] in self._turns:
                return Place(self._turns[digests[number]], messages[number:], digests[-1])
        return Place(None, messages, digests[-1])

    def note_prompt(self, place: Place, history: list[ChatMessage], run: int, num_tokens: int) -> None:
        """The model is about to write behind the conversation of `place`, which is now the history."""
        self._prompts[place.digest] = State(run, num_tokens, history)

    def note_turn(self, place: Place, history: list[ChatMessage], turn: ModelTurn, run: int, num_tokens: int) -> None:
        """It has written `turn`."""
        said = assistant_message(turn.text, turn.tool_calls)
        self._turns[_behind(place.digest, said)] = State(run, num_tokens, history, turn)


def _behind(digest: bytes, message: ChatMessage) -> bytes:
    return _digest(digest + message_key(message).encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
