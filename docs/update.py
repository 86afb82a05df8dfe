"""Write what the docs take from elsewhere: docs/files.md, tables of options and metrics, the measured one, contents.

`make docs` runs this. Sources are the code, and the stored result of the staleness bench.
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.staleness_report import docs_section  # noqa: E402
from pipeline.commands.environment_tables import tables_table  # noqa: E402
from pipeline.commands.eval_config import eval_table  # noqa: E402
from pipeline.commands.options import options_table  # noqa: E402
from pipeline.metrics import metrics_table  # noqa: E402

FOLDERS = {
    "pipeline": "What users import: config, environments, the schedule, the trainer, the command line. Knows no CUDA.",
    "workers": "What runs in the sampler and learner processes, and the messages they speak. Knows no environment.",
    "shm": "Bytes and numbers shared between processes: blocks, ledger and gate, queues, weight slots. Knows no model.",
    "bench": "Comparisons with a peer measured in the same run; models to try; the soak. Imports no test.",
    "docs": "Pages; what writes parts of them; an environment to copy.",
}
BEGIN, END = "<!-- begin: written by docs/update.py -->\n", "<!-- end -->\n"
STALENESS_COMMAND = "python -m bench.staleness"
STALENESS_RESULT = ROOT / "bench" / "results" / "staleness-cpu-2cores.json"


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring; its first sentence says what the file is for.")
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def files_page() -> str:
    """docs/files.md: one line per file, from the files themselves."""
    lines = [
        "# The files",
        "",
        "Imports run one way: `run.py` → `pipeline/` → `workers/` → `shm/`. Written by `make docs`.",
        "",
    ]
    lines += [f"- `run.py`: {purpose(ROOT / 'run.py')}"]
    for folder, meaning in FOLDERS.items():
        lines += ["", f"## {folder}/", "", meaning, ""]
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines.append(f"- `{path.relative_to(ROOT).as_posix()}`: {purpose(path)}")
    lines += [
        "",
        "## tests/",
        "",
        "- `unit/`: rules, configs, codecs; milliseconds each",
        "- `property/`: random cases against a slow oracle or an invariant",
        "- `process/`: real processes and shared memory, faults injected",
        "- `e2e/`: the user's commands on the tiny model",
        "- `data/`: recorded vectors that fix the behaviour by example; inputs on which other systems have gone wrong",
    ]
    return "\n".join(lines) + "\n"


def options_page(page: str) -> str:
    """docs/options.md with its tables renewed."""
    intro = (
        "`headway eval DIR|RUN_DIR` measures a model directory, or a run's newest checkpoint, on held-out rows, and\n"
        "trains nothing. Of a run, what is left out here is as the run had it, but for device, processes, concurrency."
    )
    mix = (
        "Several environments are mixed by tables `[[environment]]` in the file, each with what it rolls out and its\n"
        "rows. `--holdout` is for each that names neither `holdout` nor `eval_data`; all else of this is theirs."
    )
    return renewed(page, "\n\n".join((options_table(), mix, tables_table(), intro, eval_table())))


def async_page(page: str) -> str:
    """docs/async.md with its measured table renewed."""
    result = json.loads(STALENESS_RESULT.read_text(encoding="utf-8")) if STALENESS_RESULT.exists() else None
    command = STALENESS_COMMAND
    if result is not None:
        names = ("steps", "seeds", "tool_latency")
        command += "".join(f" --{name.replace('_', '-')} {result['options'][name]}" for name in names)
    return renewed(page, docs_section(result, command))


def metrics_page(page: str) -> str:
    """docs/metrics.md with its table renewed."""
    return renewed(page, metrics_table())


def decisions_page(page: str) -> str:
    """docs/decisions.md with its links to the pages of docs/decisions, and to their headings, renewed."""
    return renewed(page, "\n".join(area(path) for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))))


def area(path: Path) -> str:
    """A page of decisions in docs/decisions.md: its title, its first sentences and its headings."""
    title, meaning, *_ = path.read_text(encoding="utf-8").split("\n\n")
    target = path.relative_to(ROOT / "docs").as_posix()
    lines = [f"- [{title.removeprefix('# ')}]({target}): {' '.join(meaning.split())}"]
    for heading in re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        lines.append(f"  - [{heading}]({target}#{anchor})")
    return "\n".join(lines)


def renewed(page: str, section: str) -> str:
    """The page with `section` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + section + "\n" + END + after


# Pages of which a part is written here.
PAGES = {"options": options_page, "async": async_page, "metrics": metrics_page, "decisions": decisions_page}


def main() -> None:
    for name, renew in PAGES.items():
        path = ROOT / "docs" / f"{name}.md"
        path.write_text(renew(path.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs" / "files.md").write_text(files_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
