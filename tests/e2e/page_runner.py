"""Runs the commands and Python blocks of a page in docs/, as a user follows it in a checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MODEL = "models/SmolLM2-135M-Instruct"  # the one that the pages speak of
LINKED = ("run.py", "pipeline", "workers", "shm", "bench", "docs", "setup.cfg", "constraints.txt")


def read_page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(page, *languages):
    """(language, text) of each block in one of these, in order."""
    found = re.findall(rf"^```({'|'.join(languages)})\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found, f"the page has no block in {languages}"
    return found


def file_of(block):
    """Where a block goes that is a file, which its first line names; None for any other."""
    named = re.match(r"# ([\w/]+\.\w+)\n", block)
    return named and named[1]


def make_checkout(directory):
    """Links in `directory`, so that the page's commands find there what a checkout has."""
    for name in LINKED:
        (directory / name).symlink_to(ROOT / name)
    (directory / "bin").mkdir()
    headway = directory / "bin" / "headway"  # what the installed console script does, for this checkout
    headway.write_text(f"#!{sys.executable}\nimport sys\nfrom pipeline.commands.cli import main\nsys.exit(main())\n")
    headway.chmod(0o755)


def run(command, directory, seconds=100):
    """In `directory`, with this project first on Python's path and this Python first among the programs; what it
    prints.
    """
    programs = [str(directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    paths = {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(programs)}
    done = subprocess.run(
        command, cwd=directory, env=os.environ | paths, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def follow(block, language, directory):
    """Run a block, or write the file that it is; what it prints, or None for a file."""
    path = file_of(block) if language != "sh" else None
    if path is not None:
        (directory / path).write_text(block, encoding="utf-8")
        return None
    command = ["bash", "-e", "-c", block] if language == "sh" else [sys.executable, "-c", block]
    return run(command, directory)
