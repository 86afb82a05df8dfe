"""Environments in a thread of the supervisor: for classes that no other process can import (a script's own
`__main__`, a notebook).

It answers the same calls as an environment process, and users' code gets and gives copies as it does there: whatever it
does to a row, the row's other trajectories get it as it was. A call that never returns can be named, but not ended.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable

from pipeline.environments.activity import ActivityBoard
from pipeline.environments.host import EnvironmentHost
from pipeline.environments.resumed_loop import run_to_end
from pipeline.user_code.failures import LOGGER
from pipeline.user_code.load import MakeEnv
from workers.message_codec import decode, encode
from workers.messages import EnvironmentReplies, EnvironmentReply, Environments, Message

CLOSE_SECONDS = 5.5  # as long as an environment process has for its end


class EnvironmentThread:
    """One host on a loop of its own; replies are handed to `receive` in the run's loop, batched per tick."""

    def __init__(
        self,
        make_env: MakeEnv | dict[str, MakeEnv],
        name: str,
        timeout: float,
        max_tool_chars: int | None,
        log_path: str,
        board: ActivityBoard,
    ) -> None:
        """make_env and name as for an `EnvironmentHost`."""
        self._make_env = make_env
        self._name = name
        self._board = board
        self._timeout = timeout
        self._max_tool_chars = max_tool_chars
        self._loop = asyncio.new_event_loop()
        self._replies: list[EnvironmentReply] = []
        self._host: EnvironmentHost | None = None
        self._closed = asyncio.Event()
        # A daemon: a user's call that never returns must not keep the program from ending.
        # As in a process of their own: the traces of users' failures go to the run's logs, not to the terminal.
        self._log = logging.FileHandler(log_path, encoding="utf-8", errors="backslashreplace", delay=True)
        self._thread = threading.Thread(target=self._serve, name="headway-environments", daemon=True)

    def start(self, receive: Callable[[Message], None]) -> None:
        self._receive = receive
        self._run_loop = asyncio.get_running_loop()
        logging.getLogger(LOGGER).addHandler(self._log)
        self._thread.start()

    def send(self, message: Environments) -> None:
        """From the run's loop. Raises as `encode` does for what is no plain value."""
        self._loop.call_soon_threadsafe(self._take, _copy(message))

    def close(self) -> None:
        """Close all environments and end the thread, within CLOSE_SECONDS."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(CLOSE_SECONDS)
        logging.getLogger(LOGGER).removeHandler(self._log)
        self._log.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._board.introduce(os.getpid(), 0)
        self._host = EnvironmentHost(
            self._make_env,
            timeout=self._timeout,
            name=self._name,
            max_tool_chars=self._max_tool_chars,
            board=self._board,
        )
        run_to_end(self._loop, self._serve_calls())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve_calls(self) -> None:
        self._host.open()
        await self._closed.wait()
        await self._host.close()

    def _take(self, message: Environments) -> None:
        for call in message.calls:
            self._host.start(call, self._collect)

    def _collect(self, reply: EnvironmentReply) -> None:
        if not self._replies:
            self._loop.call_soon(self._flush)
        self._replies.append(reply)

    def _flush(self) -> None:
        replies, self._replies = self._replies, []
        if not self._run_loop.is_closed():
            self._run_loop.call_soon_threadsafe(self._receive, _copy(EnvironmentReplies(replies=replies)))


def _copy(message: Message) -> Message:
    """What a process at the other end of a link would get."""
    return decode(encode(message, 0))[1]
