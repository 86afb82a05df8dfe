"""Runs the commands and Python blocks of a page in docs/, as a user follows it in a checkout.

Our own commands and the Python blocks run in this process, on processes that are kept: as a process each, with workers
of its own, they would take ten times as long. That run.py and a script do the same when a shell starts them is proved
by test_run_py.py and test_script_without_guard.py.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.kept_processes import KEPT

ROOT = Path(__file__).parent.parent.parent
MODEL = "models/SmolLM2-135M-Instruct"  # the one that the pages speak of
LINKED = ("run.py", "recipes", "pipeline", "workers", "shm", "bench", "docs", "setup.cfg", "constraints.txt")
COMMAND = re.compile(r"^(?:python run\.py|headway (?=\w)).*\n", re.MULTILINE)


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
    """Links in `directory`, so that the page's commands find there what a checkout has, and runs go nowhere else."""
    for name in LINKED:
        (directory / name).symlink_to(ROOT / name)


def run(command, directory, seconds=100):
    """A process in `directory`, with this project first on Python's path and this Python first among the programs; what
    it prints.
    """
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    paths = {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(programs)}
    done = subprocess.run(
        command, cwd=directory, env=os.environ | paths, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def follow(block, language, directory):
    """Run a block, or write the file that it is; what it prints, or None for a file."""
    path = file_of(block) if language not in ("sh", "bash") else None
    if path is not None:
        (directory / path).write_text(block, encoding="utf-8")
        return None
    if language == "python":
        script = directory / "block.py"
        script.write_text(block, encoding="utf-8")
        return KEPT.script(directory, script)
    return _follow_commands(block, directory)


def _follow_commands(block, directory):
    """Each command of ours, and what a shell does between them."""
    printed, end = [], 0
    for command in COMMAND.finditer(block):
        if block[end : command.start()].strip():
            printed.append(run(["bash", "-e", "-c", block[end : command.start()]], directory))
        words = shlex.split(command[0])
        arguments = ["run", *words[2:]] if words[0] == "python" else words[1:]
        code, out, err = KEPT.command(directory, *arguments)
        assert code == 0, f"{command[0]}{out}{err}"
        printed.append(out)
        end = command.end()
    if block[end:].strip():
        printed.append(run(["bash", "-e", "-c", block[end:]], directory))
    return "".join(printed)
