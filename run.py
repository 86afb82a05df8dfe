"""Train a model: `python run.py --mode async`. `python run.py --help` lists the options."""

import sys
from pathlib import Path

# So that it runs from any directory, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from pipeline.commands.entry import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("run"))
