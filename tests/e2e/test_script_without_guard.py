"""Scripts that use the API without a `__main__` guard, with an environment of their own in themselves."""

import os
import tempfile

from run_py import ROOT, RunPy, audit

SETUP = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
"""

# Top to bottom, the way a notebook is written. Were it imported by a worker, it would start workers of its own.
COMMON = """
import os
import threading

import pipeline as rl

print("began in", os.getpid())
WORDS = ("say", "red", "green", "blue")


class Echo(rl.Env):
    def reset(self, row):
        return "say " + row["word"]

    @rl.tool
    async def shout(self, text: str) -> str:
        "Shout."
        return text

    seen = set()

    def reward(self, traj, row):
        Echo.seen.add((os.getpid(), threading.current_thread() is threading.main_thread()))
        return float(traj.member % 2)


rows = [{"word": word} for word in WORDS[1:]] * 8
supervisor = rl.Supervisor(model="tiny", chat=rl.TinyChat(WORDS, lambda words: []), device="cpu")


def trainer_on(model, run_dir):
    return rl.AsyncTrainer(
        engine=rl.RolloutEngine(
            model,
            env=Echo,
            schedule=rl.Schedule(concurrency=16),
            budget=rl.Budget(max_turn_tokens=2, max_context_tokens=32),
        ),
        optimizer=rl.Adam(lr=1e-3),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        groups_per_step=2,
        group_size=2,
        max_staleness=1,
        run_dir=run_dir,
    )
"""

BOTH_WAYS = """
import asyncio


async def main():
    versions = []
    async for step in trainer_on(supervisor, "again").run(rows, steps=2):
        print("step", step.n)
        versions.append(step.model_step)
    return versions


with supervisor as model:
    steps = rl.run(trainer_on(model, "run"), rows, steps=2, on_step=lambda step: print("step", step.n))
    print("model steps", [step.model_step for step in steps])
    print("environment in", *Echo.seen.pop())
    print("model steps", asyncio.run(main()))
    print("environment in", *Echo.seen.pop())
"""


def test_script_trains_with_an_environment_that_only_it_can_import(tmp_path):
    """By rl.run, then in a loop of asyncio of its own."""
    script = tmp_path / "script.py"
    script.write_text(SETUP + COMMON + BOTH_WAYS, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as temporary:
        run = RunPy(tmp_path / "run", temporary, script=script)
        try:
            assert (run.wait(), run.stderr) == (0, "")
        finally:
            run.end()
        assert [name for name in os.listdir(temporary) if name.startswith("headway-")] == []
    pid = run.process.pid
    trained = ["step 1", "step 2", "model steps [1, 2]"]
    of_its_own = f"environment in {pid} False"  # in the supervisor's process, beside its main thread
    began = f"began in {pid}"  # once: no worker has imported the script
    assert run.stdout.splitlines() == [began, *trained, of_its_own, *trained, of_its_own]
    for name in ("run", "again"):
        assert audit(tmp_path / name).returncode == 0
        assert {path.name for path in (tmp_path / name / "logs").iterdir()} == {"learner-0.log", "sampler-0.log"}
