"""A learner killed or stopped at any point of an update: the run goes on, with the weights of its journal, replayed.

What one point after the other gives is proved without processes in tests/unit/test_learner_recovery.py; here signals
end real ones, in a run with samplers and a journal on disk.
"""

import asyncio
import json
import os
import signal

import dying_learner
import numpy as np
import pytest
import torch
from dying_learner import POINTS
from running import audit, events_of, make_trainer, published_weights, steps_taken

import pipeline as rl
from pipeline.processes.worker import run_workers
from pipeline.tasks import guess
from pipeline.training.run_history import RunHistory
from workers.learning.packing import TrainingRows
from workers.learning.training import Trainee
from workers.model import init_flat
from workers.model_files.flat_weights import load_flat
from workers.model_files.optimizer_file import load_optimizer
from workers.model_files.tensor_files import OPTIMIZER

ROWS = guess.train_rows(0)
SECONDS = 600.0  # bound on a run
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)


@pytest.fixture(scope="module")
def model():
    """Whose learner dies by plan, and whose samplers check that no weights are torn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run_workers.MODULES, "learner", "dying_learner")
        patch.setenv("PYTHONPATH", dying_learner.__file__.rpartition("/")[0])
        with rl.Supervisor(device="cpu", check_weights=True, max_restarts=100) as supervisor:
            yield supervisor


async def until(happened):
    while not happened():
        await asyncio.sleep(0.02)


def train(model, run_dir, plan, *, steps, meanwhile=None, **options):
    """The versions published, each with its weights, and the run's spec. Every death of the plan must have come."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "deaths.json").write_text(json.dumps(plan))
    seen, specs, tasks = [], [], []

    async def look(step):
        if meanwhile is not None and not tasks:
            tasks.append(asyncio.create_task(meanwhile(run_dir / "logs")))
        seen.append((step.model_step, published_weights(model)))
        specs.append(model._run.spec)

    trainer = make_trainer(model, run_dir, kl_coefficient=0.1, **options)
    assert steps_taken(trainer, ROWS, steps, look, seconds=SECONDS) == list(range(1, steps + 1))
    assert len(list((run_dir / "logs").glob("died-*"))) == len(plan)
    assert len(events_of(run_dir, "restart")) == len(plan)
    assert audit(run_dir) == 0
    return seen, specs[0]


def assert_journal_gives(run_dir, seen, spec):
    """The weights of every version and the optimizer's state at the end, by a learner that nothing happens to."""
    torch.set_num_threads(spec.learner_threads)
    trainee = Trainee(
        spec.model,
        init_flat(spec.model, spec.seed),
        optimizer=spec.optimizer,
        loss=spec.loss,
        kl_coefficient=spec.kl_coefficient,
        temperature=spec.sampling["temperature"],
        micro_batch_tokens=spec.micro_batch_tokens,
    )
    last = max(version for version, _ in seen)
    published = dict(seen)
    chunks = 0
    for update in RunHistory(run_dir).updates(0, last):
        for number, rows in enumerate(update.chunks):
            trainee.forward_backward(as_training_rows(rows), update.from_version, number == 0)
            chunks += 1
        trainee.optimizer_step(update.lr, update.gradient_scale)
        assert np.array_equal(published[update.from_version + 1], trainee.flat.detach().numpy())
    checkpoint = run_dir / "checkpoints" / f"version-{last}"
    assert torch.equal(load_flat(checkpoint, spec.model), trainee.flat)
    saved = {name: torch.empty_like(tensor) for name, tensor in trainee.optimizer_state.items()}
    load_optimizer(checkpoint / OPTIMIZER, saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainee.optimizer_state.items())
    return chunks


def as_training_rows(rows):
    names = ("lengths", "tokens", "weights", "scales", "behaviour_logprobs", "versions")
    return TrainingRows(**dict(zip(names, rows.payload(), strict=True)))


def test_killed_learner_comes_back_to_the_same_weights(model, tmp_path):
    """In the middle of writing a slot; with all done and nothing told; and again in its replay."""
    plan = [
        ("slot_writing", 2, False, signal.SIGKILL),
        ("version_written", 3, False, signal.SIGSEGV),
        ("stepped", 1, True, signal.SIGKILL),
    ]
    seen, spec = train(model, tmp_path / "run", plan, steps=4)
    assert_journal_gives(tmp_path / "run", seen, spec)


def test_learner_killed_between_the_chunks_of_a_batch_comes_back_to_the_same_weights(model, tmp_path):
    plan = [("gradients_told", 2, False, signal.SIGKILL)]
    overlap = rl.ForwardBackwardBatch(min_sequences=1)
    seen, spec = train(model, tmp_path / "run", plan, steps=3, max_staleness=0, forward_backward_batch=overlap)
    assert assert_journal_gives(tmp_path / "run", seen, spec) > len(seen)


def test_sampler_killed_while_weights_are_written_is_replaced_and_the_learner_goes_on(model, tmp_path):
    """The learner stands still in the middle of it."""

    async def kill(folder):
        await until(lambda: (folder / "died-0").exists())
        victim, learner = model._run.workers.samplers[0].pid, model._run.workers.learner.pid
        os.kill(victim, signal.SIGKILL)
        await until(lambda: events_of(folder.parent, "restart"))
        os.kill(learner, signal.SIGCONT)

    plan = [("slot_writing", 2, False, signal.SIGSTOP)]
    seen, spec = train(model, tmp_path / "run", plan, steps=4, meanwhile=kill)
    assert [event["worker"] for event in events_of(tmp_path / "run", "restart")] == ["sampler 0"]
    assert_journal_gives(tmp_path / "run", seen, spec)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.RunWarning")
@pytest.mark.parametrize("number", SIGNALS)
def test_learner_may_be_killed_or_stopped_at_every_point(model, tmp_path, monkeypatch, number):
    """Who is stopped is killed for it."""
    monkeypatch.setattr(model, "worker_timeout", 5.0)
    plan = [(point, n, False, number) for n, point in enumerate(POINTS, 1)]
    seen, spec = train(model, tmp_path / "run", plan, steps=len(POINTS) + 1)
    assert_journal_gives(tmp_path / "run", seen, spec)
