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
    """Where a request goes on: behind `state` with `messages`. state: None where nothing recorded is its start."""

    state: State | None
    messages: list[ChatMessage]


class RecordedStates:
    """Of one rollout."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, State] = {}
        self._turns: dict[bytes, State] = {}

    def find(self, messages: list[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> Place:
        """The whole of `messages` as a prompt that is recorded, else the longest start of it that ends with a turn."""
        digests = _digests(messages, tools)
        if digests[-1] in self._prompts:
            return Place(self._prompts[digests[-1]], [])
        for number in range(len(messages), 0, -1):
            if digests[number] in self._turns:
                return Place(self._turns[digests[number]], messages[number:])
        return Place(None, messages)

    def note_prompt(
        self, messages: list[ChatMessage], tools: Sequence[Mapping[str, Any]], run: int, num_tokens: int
    ) -> None:
        """The model is about to write behind these messages."""
        self._prompts[_digests(messages, tools)[-1]] = State(run, num_tokens, messages)

    def note_turn(
        self,
        history: list[ChatMessage],
        turn: ModelTurn,
        tools: Sequence[Mapping[str, Any]],
        run: int,
        num_tokens: int,
    ) -> None:
        """It has written `turn`."""
        said = [*history, assistant_message(turn.text, turn.tool_calls)]
        self._turns[_digests(said, tools)[-1]] = State(run, num_tokens, history, turn)


def _digests(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Of the first 0, 1, … messages, with the tools that they were said under."""
    state = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    digests = [state.digest()]
    for message in messages:
        state.update(message_key(message).encode() + b"\n")  # no key holds a line break
        digests.append(state.copy().digest())
    return digests
