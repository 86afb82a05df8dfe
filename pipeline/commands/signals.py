"""SIGINT and SIGTERM: what they do to a command before, while and after it runs, and the exit codes."""

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any, Protocol

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Stoppable(Protocol):
    """A run that can end in order."""

    def request_stop(self) -> None: ...


class Signals:
    """The first SIGINT or SIGTERM asks the run to end in order, the second one ends it now."""

    def __init__(self, run: Stoppable) -> None:
        self.received: signal.Signals | None = None
        self._run = run
        self._task = asyncio.current_task()
        for number in EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def end_in_order(self, number: signal.Signals) -> None:
        """As if this signal had come first; nothing when one has come already."""
        if self.received is None:
            self.received = number
            self._run.request_stop()

    def _receive(self, number: signal.Signals) -> None:
        if self.received is None:
            self.end_in_order(number)
        else:
            self._task.cancel()


def end_by_signals() -> None:
    """Until a run has its own way with signals: the first ends this process with its exit code when what has begun is
    undone, the second one there and then.
    """
    for number in EXIT_CODES:
        signal.signal(number, _end)


def _end(number: int, _: Any) -> None:
    for one in EXIT_CODES:  # KeyboardInterrupt, a second time, would be a stack trace of whatever just ran
        signal.signal(one, lambda again, _: os._exit(EXIT_CODES[signal.Signals(again)]))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(EXIT_CODES[signal.Signals(number)])


def ignore_signals() -> None:
    """To be called when the outcome is decided: a signal must not change it while processes and Python end."""
    with contextlib.suppress(RuntimeError):  # no loop runs any more
        for number in EXIT_CODES:  # else the loop, when it is closed, would set the handlers from before
            asyncio.get_running_loop().remove_signal_handler(number)
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)
