"""docs/your-model.md as a user follows it, on a random small model in place of the one that the page downloads.

Nothing of a block is changed but a Python block's number of steps; the page's numbers are small enough for a test.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.tasks import calculator
from tests.small_models import write_small_model

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
MODEL = "models/SmolLM2-135M-Instruct"


def blocks(language):
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"the page has no {language} block"
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A directory in which the page's commands find what a checkout has, and the model that the page speaks of."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("run.py", "pipeline", "workers", "shm", "bench", "setup.cfg", "constraints.txt"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "bin").mkdir()
    headway = directory / "bin" / "headway"  # what the installed console script does, for this checkout
    headway.write_text(f"#!{sys.executable}\nimport sys\nfrom pipeline.commands.cli import main\nsys.exit(main())\n")
    headway.chmod(0o755)
    texts = [calculator.SYSTEM, *(message["content"] for message in calculator.EXAMPLES)]
    texts += [row["question"] for row in calculator.train_rows(0)[:200]]
    write_small_model(directory / MODEL, corpus=texts, num_merged=400)  # prompts as long as real tokenizers make them
    return directory


def run(command, directory, seconds=100):
    """In `directory`, with this project first on Python's path and this Python first among the programs."""
    programs = [str(directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    paths = {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(programs)}
    done = subprocess.run(
        command, cwd=directory, env=os.environ | paths, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)  # some ten short runs, one after the other
def test_the_page_from_its_first_command_to_its_last(checkout):
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    shown = []
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        command = ["bash", "-e", "-c", block] if language == "sh" else [sys.executable, "-c", block]
        shown.append(run(command, checkout))
    measured = [re.findall(r"^reward \S+ ± .*?truncated", output, re.MULTILINE) for output in shown]
    before, of_run, of_export = (line for lines in measured for line in lines)
    assert of_run == of_export != ""
    assert before
    # A random model is rewarded for nothing, so its batches have no gradient: the version stays.
    assert [path.name for path in (checkout / "runs" / "smol" / "checkpoints").iterdir()] == ["version-0"]


def test_the_command_that_fetches_the_model_is_there():
    (block,) = blocks("fetch")
    module = re.search(r"python -m (\S+) (\S+)", block)
    assert module[2] == MODEL
    help_text = run([sys.executable, "-m", module[1], "--help"], ROOT)
    assert "OUT_DIR" in help_text
    assert f"SMOLLM2 ?= {MODEL}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
