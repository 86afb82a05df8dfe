"""SIGINT, SIGTERM and SIGHUP: what they do to a command before, while and after it runs, and the exit codes.

A terminal that is closed sends SIGHUP two or three times, by the kernel and by the shell, all for the same. So only the
first one counts, and none after another signal: it never hurries an end that has begun.
"""

import asyncio
import contextlib
import os
import signal
from typing import Any, Protocol

from pipeline.commands.output import expect_no_reader

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class Stoppable(Protocol):
    """A run that can end in order."""

    def request_stop(self) -> None: ...


class Signals:
    """The first signal asks the run to end in order, a SIGINT or SIGTERM after it ends it now."""

    def __init__(self, run: Stoppable) -> None:
        self.received: signal.Signals | None = None
        self._run = run
        self._task = asyncio.current_task()
        for number in obeyed():
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        if signal_that_came() is not None:  # and what it has raised was swallowed; nothing has begun yet
            raise KeyboardInterrupt

    def end_in_order(self, number: signal.Signals) -> None:
        """As if this signal had come first; nothing when one has come already."""
        if self.received is None:
            self.received = number
            self._run.request_stop()

    def _receive(self, number: signal.Signals) -> None:
        expect_no_reader()
        if self.received is None:
            self.end_in_order(number)
        elif number != signal.SIGHUP:
            self._task.cancel()


def obeyed() -> list[signal.Signals]:
    """The signals that this process was not started deaf to. nohup ignores SIGHUP for its command, and a shell's script
    SIGINT for what it starts with `&`: who did so wants them to change nothing.
    """
    return [number for number in EXIT_CODES if signal.getsignal(number) is not signal.SIG_IGN]


_came: signal.Signals | None = None


def end_by_signals() -> None:
    """Until a run has its own way with signals: the first raises KeyboardInterrupt, so that what has begun is undone on
    the way out; the second one, but for SIGHUP, ends this process there and then, with its exit code.
    """
    global _came
    _came = None
    for number in obeyed():
        signal.signal(number, _end)


def signal_that_came() -> signal.Signals | None:
    """The first signal since `end_by_signals`. That it has raised is not enough: Python drops what is raised in a
    destructor or in the callback of a weak reference, some places wrap it in an error of theirs, and a bare `except` in
    a user's module takes it all.
    """
    return _came


def _end(number: int, _: Any) -> None:
    global _came
    expect_no_reader()
    if _came is not None:
        if number == signal.SIGHUP:
            return
        os._exit(EXIT_CODES[signal.Signals(number)])
    _came = signal.Signals(number)
    raise KeyboardInterrupt  # whichever it is: asyncio and our own borders to users' code let it pass


def ignore_signals() -> None:
    """To be called when the outcome is decided: a signal must not change it while processes and Python end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)  # between two handlers it would kill
    try:
        with contextlib.suppress(RuntimeError):  # no loop runs any more
            for number in EXIT_CODES:  # else the loop, when it is closed, would set the handlers from before
                asyncio.get_running_loop().remove_signal_handler(number)
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_IGN)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
