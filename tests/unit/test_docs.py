"""The docs say what the code says: the written pages are fresh, and what README and docs name exists."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from pipeline.commands.arguments import read_arguments
from pipeline.commands.options import LATER_OPTIONS, OPTIONS

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATA_PAGES = sorted((ROOT / "tests" / "data").glob("*/README.md"))


@pytest.fixture(scope="module")
def update():
    spec = importlib.util.spec_from_file_location("docs_update", ROOT / "docs" / "update.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_options_table_is_fresh(update):
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == update.options_page(page), "run `make docs`"
    assert all(f"| `{option.flag}` |" in page for option in OPTIONS.values())


def test_measured_table_is_that_of_the_stored_result(update):
    page = (ROOT / "docs" / "async.md").read_text(encoding="utf-8")
    assert page == update.async_page(page), "run `make docs`"
    assert page.count(update.BEGIN) == page.count(update.END) == 1


def test_decisions_are_listed_with_their_headings(update):
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    assert page == update.decisions_page(page), "run `make docs`"
    headings = re.findall(r"^  - \[(.+)\]\(decisions/(\w+)\.md#([\w-]+)\)$", page, re.MULTILINE)
    users = "users-code-and-other-packages-environments"
    assert ("Users' code, and other packages' environments", "environments", users) in headings
    assert len({anchor for _, _, anchor in headings}) == len(headings)  # a title names one place


def test_every_file_is_listed_with_its_purpose(update):
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert page == update.files_page(), "run `make docs`"
    for folder in ("pipeline", "workers", "shm", "bench", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            assert re.search(rf"^- `{path.relative_to(ROOT)}`: .{{10,}}$", page, re.MULTILINE), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    for target in targets:
        assert (page.parent / target).exists(), target
    assert targets or page.name != "README.md"
    for path in re.findall(r"`((?:pipeline|workers|shm|bench|tests|docs)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_use_options_that_exist(page):
    found = re.findall(r"^python run\.py (.+?)(?:\s+#.*)?$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for command in found:
        if command != "--help":
            assert read_arguments(shlex.split(command), [*OPTIONS, "config", "resume"], LATER_OPTIONS)
    assert found or page.name != "README.md"


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = [re.findall(r"\bmake ([a-z][\w-]*)(?=`|\s+#)", page.read_text(encoding="utf-8")) for page in PAGES]
    assert {"run", "test"} <= set(named[PAGES.index(ROOT / "README.md")])
    for target in sum(named, []):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", DATA_PAGES, ids=lambda page: page.parent.name)
def test_recorded_data_is_listed_with_the_test_that_reads_it(page):
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| `([\w./]+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == {path.name for path in page.parent.iterdir()} - {page.name}
    for name, test in rows:
        read = (ROOT / "tests" / test).read_text(encoding="utf-8")
        assert re.search(rf"\b{Path(name).stem}\b", read), f"{test} does not read {name}"
