"""The environment process: calls in, replies out, users' classes in between.

The story of `serve`: import the environment class that the start message names, say ready, then answer `Environments`
messages until `EndRun` closes them all, and wait for the next run's `Start`, or `Stop`. `Start.config` holds `sys_path`
(directories of the user's modules), `environment` (`"module:QualName"`; for a mix, such by name), `arguments` (keyword
arguments of the class; for a mix, those of each by name), `environment_timeout` (seconds per call), `max_tool_chars`
(where a tool's result is cut), `activity` (the block that tells what this process is at) and `try_first` (whether to
make an instance before saying ready). No torch is loaded here.
"""

import asyncio
import os
import signal
from typing import Any, Protocol

from pipeline.environments.activity import ActivityBoard
from pipeline.environments.host import EnvironmentHost
from pipeline.environments.resumed_loop import run_to_end
from pipeline.errors import RunError
from pipeline.user_code.load import load_env_makers, make_first
from shm.block import Block
from workers.import_path import take_search_path
from workers.messages import (
    EndRun,
    EnvironmentReplies,
    EnvironmentReply,
    Environments,
    Message,
    Ready,
    RunEnded,
    Start,
    Stop,
)

IDLE_SECONDS = 3600.0  # how long one look for the next run's start takes; an idle process dies with its supervisor


class Link(Protocol):
    """What is used of `workers.channel.WorkerChannel`."""

    incarnation: int

    def fileno(self) -> int:
        """ZeroMQ's descriptor: readable on an *edge*, so read until nothing is left, also after each send."""

    def send(self, message: Message) -> None: ...

    def receive(self, timeout_seconds: float) -> Message | None:
        """The next message, or None when none comes in time; 0 does not wait."""


class Server:
    """Moves calls from the link to the host, and replies back, one message per loop iteration each way."""

    def __init__(self, link: Link, host: EnvironmentHost) -> None:
        self._link = link
        self._host = host
        self._replies: list[EnvironmentReply] = []
        self._stopped: asyncio.Future | None = None

    async def run(self) -> Message:
        """Serve until `EndRun`, `Stop` or `Start`, which is returned; raises what the link raises."""
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        self._host.open()
        loop.add_reader(self._link.fileno(), self._read)
        try:
            self._read()  # an edge from before the reader was added is not seen again
            return await self._stopped
        finally:
            loop.remove_reader(self._link.fileno())
            await self._host.close()

    def _read(self) -> None:
        try:
            while not self._stopped.done() and (message := self._link.receive(0)) is not None:
                self._take(message)
        except Exception as failure:  # raised in a callback, it would be logged and lost: hand it to `run`
            self._fail(failure)

    def _take(self, message: Message) -> None:
        if isinstance(message, Environments):
            for call in message.calls:
                self._host.start(call, self._collect)
        elif isinstance(message, EndRun | Stop | Start):
            self._stopped.set_result(message)
        else:
            raise RunError(
                f"The environment process got {type(message).__name__}. It takes Environments, EndRun, Start and Stop. "
                "This is a mistake of the supervisor."
            )

    def _collect(self, reply: EnvironmentReply) -> None:
        if not self._replies:
            asyncio.get_running_loop().call_soon(self._flush)
        self._replies.append(reply)

    def _flush(self) -> None:
        replies, self._replies = self._replies, []
        try:
            self._link.send(EnvironmentReplies(replies))
        except Exception as failure:  # as in _read
            self._fail(failure)
            return
        self._read()  # sending may have swallowed the descriptor's edge

    def _fail(self, failure: Exception) -> None:
        if not self._stopped.done():
            self._stopped.set_exception(failure)


def serve(link: Link, config: dict[str, Any]) -> dict[str, Any] | None:
    """One run; returns the next one's config, or None when told to stop."""
    take_search_path(config["sys_path"])
    make_env, name = load_env_makers(config["environment"], config["arguments"])
    with Block.open(config["activity"]["path"], config["activity"]["num_bytes"]) as block:
        board = ActivityBoard(block.view)
        board.introduce(os.getpid(), link.incarnation)
        host = EnvironmentHost(
            make_first(make_env, name) if config["try_first"] else make_env,
            timeout=config["environment_timeout"],
            max_tool_chars=config["max_tool_chars"],
            name=name,
            board=board,
        )
        _outlive_alarms()
        link.send(Ready(detail={}))
        # Without asyncio.run: at its end it would wait for threads in which users' code may never return.
        loop = asyncio.new_event_loop()
        try:
            ending = run_to_end(loop, Server(link, host).run())
        finally:
            loop.close()
    return _next_config(link, ending)


def _outlive_alarms() -> None:
    """One that a tool sets in its thread, where it can't handle it, does not end the process. A function, since what is
    ignored would be ignored in the processes that users' code starts, too.
    """
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.signal(signal.SIGALRM, lambda *_: None)


def _next_config(link: Link, ending: Message) -> dict[str, Any] | None:
    """The config of the next run, or None to end."""
    message: Message | None = ending
    while not isinstance(message, Start | Stop):  # whatever else comes belongs to the run that is over
        if isinstance(message, EndRun):
            link.send(RunEnded())
        message = link.receive(IDLE_SECONDS)
    return message.config if isinstance(message, Start) else None
