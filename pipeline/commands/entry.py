"""Where `headway` and run.py begin: what a signal does while modules load and while Python ends, what becomes of output
that nobody can read, and what is said when a package is missing.
"""

import os
import signal
import sys
from types import FrameType

from pipeline.commands.output import outlive_terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(*before: str) -> int:
    """The exit code of the command line's words, with `before` in front of them."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # see `obeyed` in signals.py
            signal.signal(number, _end)
    outlive_terminal()
    try:
        return _run([*before, *sys.argv[1:]])
    finally:
        for number in SIGNALS:  # Python, as it ends, gives all other handlers up
            signal.signal(number, signal.SIG_IGN)


def _run(words: list[str]) -> int:
    # Here and not at the top: a signal while modules load, or a package that is missing, must not end in a stack trace.
    try:
        from pipeline.commands.cli import main as command
    except ModuleNotFoundError as error:
        print(f"headway: {error.name} is not installed; run `make run`, or `pip install -e .`.", file=sys.stderr)
        return 2
    return command(words)


def _end(number: int, _: FrameType | None) -> None:
    """Until `pipeline/commands/signals.py` takes over. Nothing has begun that would have to be undone, and an exception
    would not do: where a module is loading, it can be wrapped or swallowed.
    """
    os._exit(128 + number)
