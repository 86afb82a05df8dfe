"""The memory estimate against what processes really take: from above, and not by much."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from running import make_trainer

import pipeline as rl
from pipeline.memory.activations import learner_cost
from pipeline.memory.estimate import run_parts, totals
from pipeline.memory.make_spec import make_spec
from pipeline.tasks import guess
from workers.model_config import TINY

HERE = Path(__file__).parent
LARGE = {"vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1536, "num_layers": 3, "num_heads": 8}
LARGE |= {"num_kv_heads": 4, "head_dim": 64}


def proportional_bytes(pid: int, key: str) -> int:
    """Memory that several processes share counts in parts."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE)[1]) * 1024


def test_a_runs_processes_take_what_was_estimated(tmp_path):
    """Contexts are not as long as they may be, so the estimate is from above. Weights are most of it here."""
    with rl.Supervisor(device="cpu", model_config=replace(TINY, **LARGE)) as model:
        trainer = make_trainer(
            model,
            tmp_path / "run",
            schedule=rl.Schedule(concurrency=16),
            budget=rl.Budget(max_turn_tokens=1, max_context_tokens=32),
        )
        parts = run_parts(make_spec(model, trainer.config))
        before = proportional_bytes(os.getpid(), "Pss_Shmem")  # what earlier tests of this process still map
        found = []

        def measure(step):
            workers = sum(proportional_bytes(handle.pid, "Pss") for handle in model._pool.handles)
            # Of this process its share of the slots alone: what pytest has loaded is no run's.
            found.append(workers + proportional_bytes(os.getpid(), "Pss_Shmem") - before)

        rl.run(trainer, guess.train_rows(0), steps=2, on_step=measure)
    estimated = totals(parts)["cpu"]
    assert 0.6 * estimated < max(found) < estimated


BATCHES = {
    "layers": (LARGE | {"vocab_size": 64}, 4, 128),
    "logits": (LARGE | {"vocab_size": 32000, "hidden_size": 128, "num_layers": 1, "tie_embeddings": True}, 4, 128),
}


@pytest.fixture(scope="module")
def measured():
    """The bytes that each of BATCHES takes."""
    child = subprocess.run(
        [sys.executable, str(HERE / "measure_activations.py"), repr(list(BATCHES.values()))],
        # Else the allocator keeps what is freed, and a peak hides in what is there already.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    return dict(zip(BATCHES, map(int, child.stdout.split()), strict=True))


@pytest.mark.parametrize("name", BATCHES)
def test_a_micro_batch_takes_what_was_estimated(measured, name):
    config, num_rows, length = BATCHES[name]
    model = replace(TINY, **config)
    cost = learner_cost(model, "float32", temperature=1.0, has_reference=False, has_entropy=False)
    largest = max(model.vocab_size * model.hidden_size, 2 * model.intermediate_size * model.hidden_size) * 4
    estimated = cost.num_bytes(num_rows * length, num_rows * length) + largest
    assert 0.6 * estimated < measured[name] < 1.2 * estimated
