"""The README's Python runs as it stands: a script without a `__main__` guard, with an environment of its own.

In this process, on processes that are kept. That such a script does the same when a shell starts it is proved by
test_script_without_guard.py.
"""

import re
from pathlib import Path

from pipeline import audit

ROOT = Path(__file__).parent.parent.parent


def test_readme_script_learns_and_leaves_a_run_that_passes_the_audit(kept, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "echo.py"
    script.write_text(code, encoding="utf-8")
    rewards = [float(line.split()[1]) for line in kept.script(tmp_path, script).splitlines()]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert audit.main(str(run_dir / "events.jsonl")) == 0
