"""docs/your-model.md as a user follows it, on a random small model in place of the one that the page downloads.

Nothing of a block is changed but a Python block's number of steps; the page's numbers are small enough for a test.
"""

import re
import sys

import pytest

from bench.small_models import write_small_model
from pipeline.tasks import calculator
from tests.e2e.page_runner import MODEL, ROOT, blocks, follow, make_checkout, read_page, run

PAGE = read_page("your-model.md")


@pytest.fixture(scope="module")
def checkout(kept, tmp_path_factory):
    """A directory in which the page's commands find what a checkout has, and the model that the page speaks of."""
    directory = tmp_path_factory.mktemp("checkout")
    make_checkout(directory)
    texts = [calculator.SYSTEM, *(message["content"] for message in calculator.EXAMPLES)]
    texts += [row["question"] for row in calculator.train_rows(0)[:200]]
    write_small_model(directory / MODEL, corpus=texts, num_merged=400)  # prompts as long as real tokenizers make them
    return directory


def test_the_page_from_its_first_command_to_its_last(checkout):
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    shown = [follow(block, language, checkout) for language, block in blocks(PAGE, "sh", "python")]
    measured = [re.findall(r"^reward \S+ ± .*?truncated", output, re.MULTILINE) for output in shown]
    before, of_run, of_export = (line for lines in measured for line in lines)
    assert of_run == of_export != ""
    assert before
    # A random model is rewarded for nothing, so its batches have no gradient: the version stays.
    assert [path.name for path in (checkout / "runs" / "smol" / "checkpoints").iterdir()] == ["version-0"]


def test_the_command_that_fetches_the_model_is_there():
    ((_, block),) = blocks(PAGE, "fetch")
    module = re.search(r"python -m (\S+) (\S+)", block)
    assert module[2] == MODEL
    help_text = run([sys.executable, "-m", module[1], "--help"], ROOT)
    assert "OUT_DIR" in help_text
    assert f"SMOLLM2 ?= {MODEL}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
