"""Train a model: `python run.py --mode async`. `python run.py --help` lists the options."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

# So that it runs from any directory, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent))


def start() -> int:
    """The exit code of `headway run` with this script's arguments."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    # Here and not at the top: a signal while modules load, or a package that is missing, must not end in a stack trace.
    try:
        from pipeline.commands.cli import main
    except ModuleNotFoundError as error:
        print(f"headway: {error.name} is not installed; run `make run`, or `pip install -e .`.", file=sys.stderr)
        return 2
    return main(["run", *sys.argv[1:]])


def end(number: int, _: FrameType | None) -> None:
    """What a signal does while modules load; `pipeline/commands/signals.py` does the same from then on."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda again, _: os._exit(128 + again))  # the second one: at once
    sys.exit(128 + number)


if __name__ == "__main__":
    try:
        code = start()
    finally:
        for ending in (signal.SIGINT, signal.SIGTERM):  # Python, as it ends, gives all other handlers up
            signal.signal(ending, signal.SIG_IGN)
    sys.exit(code)
