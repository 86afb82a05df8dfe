"""Payloads over a shared-memory queue: whole when small, in pieces when larger than a quarter of it.

The sender is asynchronous (the supervisor must never block), the receiver is a plain worker loop. Freed space comes
back as `consumed` on messages the other way; `note_consumed` wakes whoever waits for room.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from shm.errors import QueueError
from shm.queue import QueueConsumer, QueueProducer
from workers.messages import Consumed, Message, Payload

IN_PIECES = -1  # a `position` that means: the payload is what the `Payload` messages before brought
ROOM_SECONDS = 600.0  # bound on a wait for room; a worker that reads nothing for so long is lost


class Outbox:
    """The supervisor's sending end of one worker's queue. One transfer at a time: its callers take turns."""

    def __init__(self, producer: QueueProducer, send: Callable[[Message], None], name: str) -> None:
        self._producer = producer
        self._send = send
        self._name = name
        self._room = asyncio.Event()
        self._failure: Exception | None = None

    def room(self) -> int:
        return self._producer.room()

    @property
    def largest_piece(self) -> int:
        return self._producer.largest_piece

    def note_consumed(self, consumed: int) -> None:
        self._producer.release(consumed)
        self._room.set()

    def fail(self, error: Exception) -> None:
        """Nobody will read any more: whoever waits for room gets `error`."""
        self._failure = error
        self._room.set()

    def write(self, *parts: Any) -> int:
        """Write parts that fit as they are (`room`, `largest_piece`); returns their position."""
        return self._producer.write(*parts)

    async def put(self, *parts: Any) -> int:
        """Write the parts end to end and return their position, or IN_PIECES.

        Waits for room, at most ROOM_SECONDS; then QueueError. Raises what `fail` was told. The message
        that names the position must be sent before the next put.
        """
        length = sum(memoryview(part).nbytes for part in parts)
        if length <= self.largest_piece:
            await self._wait_for_room(length)
            return self._producer.write(*parts)
        data = memoryview(b"".join(memoryview(part).cast("B") for part in parts))
        for start in range(0, length, self.largest_piece):
            piece = data[start : start + self.largest_piece]
            await self._wait_for_room(len(piece))
            self._send(Payload(position=self._producer.write(piece), length=len(piece)))
        return IN_PIECES

    async def _wait_for_room(self, length: int) -> None:
        while True:
            if self._failure is not None:  # first: after `fail` nothing is written any more, whatever room there is
                raise self._failure
            if self._producer.room() >= length:
                return
            self._room.clear()
            try:
                async with asyncio.timeout(ROOM_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                raise QueueError(
                    f"{self._name} has read nothing from its queue for {ROOM_SECONDS:g} s while {length} bytes wait."
                ) from None


class Inbox:
    """A worker's receiving end."""

    def __init__(self, consumer: QueueConsumer) -> None:
        self._consumer = consumer
        self._reported = 0
        self._pieces: list[bytes | bytearray] = []

    def add_piece(self, piece: Payload) -> None:
        self._pieces.append(self._consumer.read(piece.position, piece.length))

    def take(self, position: int, length: int) -> bytes | bytearray:
        """The payload of the message in hand. Raises QueueError when the pieces don't add up to `length` bytes."""
        if position != IN_PIECES:
            return self._consumer.read(position, length)
        data = b"".join(self._pieces)
        self._pieces.clear()
        if len(data) != length:
            raise QueueError(f"A payload of {length} bytes arrived as pieces of {len(data)} bytes in all.")
        return data

    @property
    def consumed(self) -> int:
        """What to put on a message the other way; it then counts as reported."""
        self._reported = self._consumer.consumed
        return self._reported

    def report(self) -> Consumed | None:
        """A message of its own, when enough was read since the last one that the sender may be waiting."""
        if not self._consumer.overdue(self._reported):
            return None
        return Consumed(consumed=self.consumed)
