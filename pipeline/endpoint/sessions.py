"""Rollouts that agents drive, each with a bearer token of its own; those that wait for a harness go out in order.

A token is valid from `open` to `close`, then spent. Tokens are kept as digests only, so that nothing that is printed
or dumped holds one.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.endpoint.chat_reply import Answer
from pipeline.endpoint.chat_request import ChatRequest
from pipeline.endpoint.refusal import UNAUTHORIZED, Refusal

MAX_SPENT = 100_000  # tokens of ended rollouts that are still told apart from unknown ones
TOKEN_BYTES = 32


class Driven(Protocol):
    """A rollout as its agent's requests reach it."""

    async def complete(self, request: ChatRequest, is_wanted: Callable[[], bool]) -> Answer:
        """The model's next turn; is_wanted: whether anybody still waits for it. Raises Refusal."""

    def score(self, reward: Any, metrics: Any) -> None:
        """Ends it. Raises Refusal for what is no reward."""

    def give_up(self, sentence: str) -> None:
        """Ends it as failed."""

    def touch(self) -> None:
        """Its harness was heard of."""

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


@dataclass(eq=False, slots=True)
class Session:
    """One rollout from its start to its end. number: of the run, so a rollout that starts again has a new one.

    offer: what a harness is told of it, its token aside; None for a rollout that Headway's own call drives.
    """

    number: int
    driven: Driven
    offer: dict[str, Any] | None
    digest: bytes = field(repr=False, default=b"")
    taken: bool = False
    num_answers: int = 0


class Sessions:
    """now: the loop's clock, seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.heard_at = now()  # when a harness last asked for a rollout, or for anything of one
        self.num_requests = 0  # for turns of the model, under way
        self._numbers = 0
        self._open: dict[bytes, Session] = {}
        self._spent: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: deque[tuple[Session, str]] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()

    def open(self, driven: Driven, offer: dict[str, Any] | None) -> tuple[Session, str]:
        """A rollout and its token. One with an offer waits for a harness to take it."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._numbers += 1
        session = Session(self._numbers, driven, offer, _digest(token))
        self._open[session.digest] = session
        if offer is not None:
            self._waiting.append((session, token))
            self._wake()
        return session, token

    def hear(self) -> float:
        """A harness, or an agent, was heard of now."""
        self.heard_at = self._now()
        return self.heard_at

    def close(self, session: Session) -> None:
        """It has ended: its token is spent."""
        if self._open.pop(session.digest, None) is None:
            return
        self._spent[session.digest] = None
        while len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)

    def find(self, token: str) -> Session:
        """The running rollout with this token. Raises Refusal."""
        digest = _digest(token)
        session = self._open.get(digest)
        if session is None or not hmac.compare_digest(session.digest, digest):
            if self.is_spent(token):
                raise Refusal(
                    UNAUTHORIZED, "The token's rollout has ended, and the token is spent.", code="token_spent"
                )
            raise Refusal(UNAUTHORIZED, "The token is that of no rollout of this run.", code="invalid_api_key")
        return session

    def is_spent(self, token: str) -> bool:
        return _digest(token) in self._spent

    async def take(self, seconds: float) -> tuple[Session, str] | None:
        """The rollout that has waited longest, and its token; None when none comes in time."""
        deadline = self._now() + seconds
        while True:
            while self._waiting:
                session, token = self._waiting.popleft()
                if session.digest in self._open:
                    session.taken = True
                    return session, token
            left = deadline - self._now()
            if left <= 0.0:
                return None
            arrived = asyncio.get_running_loop().create_future()
            self._takers.append(arrived)
            try:
                await asyncio.wait({arrived}, timeout=left)
            finally:
                if arrived.done():  # it was woken, and may be going: another one may take what came
                    self._wake()
                else:
                    self._takers.remove(arrived)

    def put_back(self, session: Session, token: str) -> None:
        """Who took it is gone before it knew of it."""
        session.taken = False
        self._waiting.appendleft((session, token))
        self._wake()

    @property
    def num_takers(self) -> int:
        """Harnesses that wait for a rollout now."""
        return len(self._takers)

    def _wake(self) -> None:
        while self._takers and self._waiting:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return


def same_token(given: str, token: str) -> bool:
    """In a time that says nothing of where they differ."""
    return hmac.compare_digest(_bytes(given), _bytes(token))


def _digest(token: str) -> bytes:
    return hashlib.sha256(_bytes(token)).digest()


def _bytes(token: str) -> bytes:
    """As a header had them: what is no UTF-8 there comes in surrogates."""
    return token.encode(errors="surrogateescape")
