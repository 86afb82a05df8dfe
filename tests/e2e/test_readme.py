"""The README's Python runs as it stands: a script without a `__main__` guard, with an environment of its own."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_readme_script_learns_and_leaves_a_run_that_passes_the_audit(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "echo.py"
    script.write_text(f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\n{code}")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    rewards = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    (run_dir,) = (tmp_path / "runs").iterdir()
    audit = [sys.executable, "-m", "pipeline.audit", str(run_dir / "events.jsonl")]
    assert subprocess.run(audit, cwd=ROOT, capture_output=True, timeout=60).returncode == 0
