"""ZeroMQ links between the supervisor and its workers: one DEALER-DEALER pair per incarnation of a worker.

DEALER on both ends because a ROUTER silently drops what it can't route; high-water marks are off because every
message is bounded already (by the room reserved in the shared-memory queues), so nothing is ever dropped or blocked
on. A socket belongs to the thread that made it. Each incarnation gets an endpoint of its own, so nothing of a dead
predecessor can arrive.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from workers.errors import ChannelError, MessageError
from workers.message_codec import decode, encode
from workers.messages import Message

LAST_WORDS_LINGER_MS = 1000  # how long a worker that ends may take to hand over what it has sent


def _dealer(context: zmq.Context, linger_ms: int) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.linger = linger_ms
    return socket


class WorkerChannel:
    """The worker's end: connects, sends, and receives with a deadline. For one thread only."""

    def __init__(self, endpoint: str, incarnation: int) -> None:
        self.incarnation = incarnation
        self._thread = threading.get_ident()
        self._context = zmq.Context()
        self._socket = _dealer(self._context, LAST_WORDS_LINGER_MS)
        self._socket.connect(endpoint)

    def fileno(self) -> int:
        """Becomes readable, edge-triggered, when the socket's state changes: drain with `receive(0)` until None."""
        return self._socket.getsockopt(zmq.FD)

    def send(self, message: Message) -> None:
        self._check_thread()
        self._socket.send(encode(message, self.incarnation), copy=True)

    def receive(self, timeout_seconds: float) -> Message | None:
        """The next message, or None after `timeout_seconds` (0: look only)."""
        self._check_thread()
        if timeout_seconds > 0 and not self._socket.poll(int(timeout_seconds * 1000)):
            return None
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        incarnation, message = decode(data)
        if incarnation != self.incarnation:
            raise MessageError(f"A {type(message).__name__} for incarnation {incarnation} reached {self.incarnation}.")
        return message

    def close(self) -> None:
        """Hand over what was sent (for at most a second) and close. Idempotent."""
        if not self._socket.closed:
            self._socket.close()
            self._context.term()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ChannelError("A channel was used from a thread that did not make it; ZeroMQ sockets can't be shared.")


class SupervisorLink:
    """The supervisor's end: binds, and hands each message to `on_message` from the asyncio loop it is attached to.

    It reads the socket's own descriptor in the loop rather than through `zmq.asyncio`, whose future per message costs
    more than the message. The descriptor is edge-triggered: it must be drained, and looked at again after each send.
    """

    def __init__(self, context: zmq.Context, endpoint: str, incarnation: int, name: str) -> None:
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.name = name
        self._thread = threading.get_ident()
        self._socket = _dealer(context, linger_ms=0)
        self._socket.bind(endpoint)
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)  # its directory keeps others out already
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[Message], None] | None = None
        self._on_error: Callable[[Exception], None] | None = None
        self._recheck: asyncio.Handle | None = None
        self._num_sent = self._num_received = 0
        self._received_at: float | None = None

    def state(self) -> dict[str, Any]:
        """For a report: messages each way, and how long ago the last one came."""
        silent = None if self._received_at is None else round(time.monotonic() - self._received_at, 3)
        counts = {"sent": self._num_sent, "received": self._num_received, "seconds_since_received": silent}
        return {"endpoint": self.endpoint, "incarnation": self.incarnation} | counts

    def attach(self, on_message: Callable[[Message], None], on_error: Callable[[Exception], None]) -> None:
        """Deliver messages from now on, in the running loop. `on_error` gets what a message's decoding or delivery
        raises: raised in the loop's callback it would be lost. The messages behind it are delivered all the same.
        """
        self.detach()
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_error = on_message, on_error
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._drain)
        self._look_again()

    def detach(self) -> None:
        """Deliver no more; what arrives waits in the socket."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
            if self._recheck is not None:
                self._recheck.cancel()
        self._loop = self._on_message = self._on_error = self._recheck = None

    def send(self, message: Message) -> None:
        """Never blocks. With no worker at the other end (it is gone, or not up yet) the message is dropped: of its
        death the process's sentinel tells. Raises ChannelError after `close` or from another thread.
        """
        if self._socket.closed:
            raise ChannelError(f"The link to {self.name} is closed; nothing can be sent to it.")
        if threading.get_ident() != self._thread:
            raise ChannelError(f"The link to {self.name} was used from a thread that did not make it.")
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message, self.incarnation), zmq.NOBLOCK)
            self._num_sent += 1
        self._look_again()

    def close(self) -> None:
        """Detach, close, and remove the endpoint's file. Idempotent."""
        self.detach()
        if not self._socket.closed:
            self._socket.close()
            path = self.endpoint.removeprefix("ipc://")
            if os.path.exists(path):
                os.unlink(path)

    def _look_again(self) -> None:
        if self._loop is not None and self._recheck is None:
            self._recheck = self._loop.call_soon(self._drain)

    def drain(self) -> None:
        """Deliver what has arrived, now."""
        self._drain()

    def _drain(self) -> None:
        self._recheck = None
        while self._on_message is not None and not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._num_received += 1
            self._received_at = time.monotonic()
            on_error = self._on_error
            try:
                incarnation, message = decode(data)
                if incarnation == self.incarnation:
                    self._on_message(message)
            except Exception as error:  # this callback is an outermost frame
                on_error(error)
