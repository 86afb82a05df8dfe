"""A bounded queue of bytes in shared memory: one producer process, one consumer process, no lock.

The ring itself holds payload bytes only. Positions (bytes written since the start, never wrapped) travel in messages:
the producer's header names position and length, the consumer's messages carry back how much it has read (`consumed`).
So every hand-over of memory is ordered by a message, on ARM too, and a killed process leaves no lock and no
half-moved pointer. A payload may wrap round the end of the ring.

Why a worker never waits to answer. The supervisor keeps a `ReplyRoom` per worker, as large as the reply ring, and
sends a request only when it could reserve the largest possible reply; it releases that after it has read the reply.
Take the moment when a message with `consumed` = c is built. What the worker has written beyond c are replies that the
supervisor has not read, so their reservations are still held, and so are those of the requests not yet answered, this
message's included: together at most the ring. When the worker acts on the message it knows c, so its free room covers
every request it still has to answer; an answer only turns reserved room into used room. This needs two habits of the
supervisor: reserve before the message is built, and take `consumed` at that moment. `Queue full` in a worker is
therefore a bug, and raises.

Why two full queues can't hold each other up. A cycle needs both sides to wait for room. The worker never does; it
goes on reading requests, and each payload it reads is copied out at once. It reports what it has read with every
answer and, when `overdue`, in a message of its own; so the room it has not yet reported is less than a quarter of the
ring, and a piece of at most a quarter (`largest_piece`) fits in the end. The supervisor keeps what does not fit yet
in its own memory.
"""

from typing import Any

from shm.errors import QueueError

_PIECE_FRACTION = 4  # largest piece, and largest silence of a consumer, as a fraction of the ring


class QueueProducer:
    """The writing end over `view` (writable bytes, the whole ring)."""

    def __init__(self, view: memoryview) -> None:
        if len(view) < _PIECE_FRACTION:
            raise QueueError(f"A queue of {len(view)} bytes is too small; give at least {_PIECE_FRACTION}.")
        self._view = view[:]  # its own, to be given back
        self._written = 0
        self._released = 0
        self.capacity = len(view)
        self.largest_piece = self.capacity // _PIECE_FRACTION

    def room(self) -> int:
        """Bytes that can be written now, as far as the consumer's messages have told."""
        return self.capacity - (self._written - self._released)

    def write(self, *parts: Any) -> int:
        """Copy the parts (contiguous buffers: bytes, arrays) in, end to end; return the position of the first byte.

        Never waits. Raises QueueError, with nothing written, when they don't fit. The header that names the returned
        position must be sent before that of the next write.
        """
        views = [memoryview(part) for part in parts]
        length = sum(view.nbytes for view in views)
        if length > self.room():
            raise QueueError(
                f"A payload of {length} bytes was written to a queue with {self.room()} of {self.capacity} bytes free; "
                "a producer asks `room` first, or writes where room was reserved."
            )
        position = self._written
        for view in views:
            if view.nbytes:  # an empty array can't be cast
                self._copy_in(view.cast("B"))
        return position

    def _copy_in(self, data: memoryview) -> None:
        start = self._written % self.capacity
        head = min(len(data), self.capacity - start)
        self._view[start : start + head] = data[:head]
        self._view[: len(data) - head] = data[head:]
        self._written += len(data)

    def release(self, consumed: int) -> None:
        """Take note of the consumer's `consumed`; the room before it is free again."""
        if not self._released <= consumed <= self._written:
            raise QueueError(
                f"The consumer says it has read {consumed} bytes, but {self._released} were read before and "
                f"{self._written} written; a message was lost, came twice, or belongs to another queue."
            )
        self._released = consumed

    def close(self) -> None:
        """Give the ring's memory up, whoever still knows this end; nothing is written any more."""
        self._view.release()


class QueueConsumer:
    """The reading end over `view`. `consumed` goes back to the producer with the next message."""

    def __init__(self, view: memoryview) -> None:
        self._view = view[:]  # its own, to be given back
        self.capacity = len(view)
        self.consumed = 0

    def read(self, position: int, length: int) -> bytearray:
        """Copy out the payload that a header named. Raises QueueError when headers come out of order.

        The copy is the caller's own and aligned for any dtype (`numpy.frombuffer`), wherever in the ring it lay.
        """
        if position != self.consumed or not 0 <= length <= self.capacity:
            raise QueueError(
                f"A header names {length} bytes at position {position}, but {self.consumed} bytes of this queue of "
                f"{self.capacity} have been read; payloads are read in the order in which they were written."
            )
        start = position % self.capacity
        data = bytearray(self._view[start : start + length])
        if len(data) < length:
            data += self._view[: length - len(data)]
        self.consumed += length
        return data

    def overdue(self, reported: int) -> bool:
        """Must `consumed` be sent in a message of its own? `reported`: its value in the last message sent."""
        return self.consumed - reported >= self.capacity // _PIECE_FRACTION

    def close(self) -> None:
        """Give the ring's memory up, whoever still knows this end; nothing is read any more."""
        self._view.release()


class ReplyRoom:
    """The supervisor's account of a worker's reply ring: room promised to requests, back when replies are read."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0

    def reserve(self, num_bytes: int) -> bool:
        """Promise room for a reply of up to `num_bytes`; False when it must wait. QueueError if it could never fit."""
        if not 0 <= num_bytes <= self.capacity:
            raise QueueError(
                f"A reply of up to {num_bytes} bytes can't be reserved in a queue of {self.capacity} bytes; "
                "ask for less at once, or make the queue larger."
            )
        if self.reserved + num_bytes > self.capacity:
            return False
        self.reserved += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Give back what `reserve` promised (all of it, also after a shorter reply), once the reply has been read."""
        if not 0 <= num_bytes <= self.reserved:
            raise QueueError(f"{num_bytes} bytes of reply room were released, but {self.reserved} are reserved.")
        self.reserved -= num_bytes
