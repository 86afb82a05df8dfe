"""stdout and stderr of a command, whose end must stay in order though nobody can read what it prints any more."""

import errno
import io
import sys
from typing import Any, TextIO

_ends = False


def outlive_terminal() -> None:
    """What is printed from now on is dropped once the terminal that it goes to has been closed (EIO)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # Python found the descriptor closed
            setattr(sys, name, _lasting(stream))


def expect_no_reader() -> None:
    """A signal has come: it may have ended the reader of our pipe, too (`… | tee`, on Ctrl-C), which else ends a run.
    What can't be written to it from now on is dropped.
    """
    global _ends
    _ends = True


class _Lasting(io.FileIO):
    """One of the descriptors that we were started with; it stays open."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._was_terminal = self.isatty()

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            closed = error.errno == errno.EIO and self._was_terminal
            if closed or (error.errno == errno.EPIPE and _ends):
                return memoryview(data).nbytes
            raise


def _lasting(stream: TextIO) -> TextIO:
    """As Python has made `stream`, for the same descriptor."""
    raw = _Lasting(stream.fileno())
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
