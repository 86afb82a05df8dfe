"""Train a model: `python run.py --mode async`. `python run.py --help` lists the options."""

import signal
import sys
from pathlib import Path

# So that it runs from any directory, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent))


def start() -> int:
    """The exit code of `headway run` with this script's arguments."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as `pipeline/commands/signals.py` does, while that loads
    # Here and not at the top: Ctrl-C while modules load, or a package that is missing, must not end in a stack trace.
    try:
        from pipeline.commands.cli import main
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        print(f"headway: {error.name} is not installed; run `make run`, or `pip install -e .`.", file=sys.stderr)
        return 2
    return main(["run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(start())
