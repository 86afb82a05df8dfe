"""Write the docs that follow from the code: docs/files.md and the table in docs/options.md. `make docs` runs this."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.options import options_table  # noqa: E402

FOLDERS = {
    "pipeline": "What users import: config, environments, the schedule, the trainer, the command line. Knows no CUDA.",
    "workers": "What runs in the sampler and learner processes, and the messages they speak. Knows no environment.",
    "shm": "Bytes and numbers shared between processes: blocks, ledger and gate, queues, weight slots. Knows no model.",
    "bench": "Comparisons that print ratios to a peer measured in the same run.",
}
BEGIN, END = "<!-- begin: written by docs/update.py -->\n", "<!-- end -->\n"


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
        "- `data/`: recorded vectors that fix the behaviour by example",
    ]
    return "\n".join(lines) + "\n"


def options_page(page: str) -> str:
    """docs/options.md with its table renewed."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + options_table() + "\n" + END + after


def main() -> None:
    options = ROOT / "docs" / "options.md"
    options.write_text(options_page(options.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs" / "files.md").write_text(files_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
