"""What the process tests share: a trainer for `guess`, the events of a run, and what it must leave behind (nothing)."""

import asyncio
import json
import os
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest

import pipeline as rl
from pipeline.commands import cli
from pipeline.metrics import METRICS
from pipeline.models.model_directory import ModelSource
from pipeline.processes.worker.run_workers import MODULES
from pipeline.tasks import guess
from shm.block import Block
from tests.defined_metrics import metric_of


def make_trainer(
    model,
    run_dir,
    env=guess.Guess,
    *,
    arguments=None,
    schedule=None,
    budget=None,
    timeout=600.0,
    sampling=None,
    **options,
):
    """An AsyncTrainer for `guess` with the defaults of run.py, small where time is."""
    engine = rl.RolloutEngine(
        model,
        env=env,
        env_arguments=arguments,
        schedule=schedule or rl.Schedule(concurrency=192),
        budget=budget or rl.Budget(max_turn_tokens=guess.MAX_TURN_TOKENS, max_context_tokens=128),
        environment_timeout=timeout,
        **(sampling or {}),
    )
    defaults = {
        "groups_per_step": 4,
        "group_size": 4,
        "max_staleness": 2,
        "optimizer": rl.Adam(lr=1e-3),
        "loss": rl.CISPO(normalize="token"),
        "completion": rl.GroupCompletion(mode="wait"),
    }
    return rl.AsyncTrainer(engine=engine, run_dir=str(run_dir), **(defaults | options))


def use(model: rl.Supervisor, source: ModelSource) -> None:
    """As if the Supervisor had been made with this model: processes take any, and take longest to start."""
    model.source, model.chat, model.model_config = source, source.chat, source.config


def published_weights(model: rl.Supervisor, version: int | None = None) -> np.ndarray:
    """A copy of the slot of `version` (None: the committed one), float32."""
    run = model._run
    slot = run.slots.slot_of(run.slots.committed if version is None else version)
    fields = run._blocks.learner_config()["slots"]["blocks"][slot]
    with Block.open(fields["path"], fields["num_bytes"]) as block:
        return np.frombuffer(block.view, dtype=np.float32).copy()


def steps_taken(trainer, rows, steps, act=None, *, seconds):
    """The numbers of a run's steps, all of them within so many seconds; `act(step)` is awaited after each."""

    async def collect():
        numbers = []
        async for step in trainer.run(rows, steps=steps):
            numbers.append(step.n)
            if act is not None:
                await act(step)
        return numbers

    return asyncio.run(asyncio.wait_for(collect(), seconds))


def events_of(run_dir, kind=None):
    with open(os.path.join(run_dir, "events.jsonl"), encoding="utf-8") as file:
        events = [json.loads(line) for line in file]
    return events if kind is None else [event for event in events if event["event"] == kind]


def audit(run_dir):
    """`headway audit`: its exit code. What the run's metrics say is checked on the way."""
    check_metrics(run_dir)
    return cli.main(["audit", str(run_dir)])


def metrics_of(run_dir):
    """The run's metrics, step by step; none of a run that was never able to write any."""
    path = os.path.join(run_dir, "metrics.jsonl")
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@dataclass
class Booked:
    """What runs one after the other say of one process: the seconds that it was busy, waiting or idle, against those
    that there were. The clocks are read one after the other, so a run is a few milliseconds short or long, on a busy
    machine more; that says something when the runs together took ENOUGH_SECONDS, and is tried then.
    """

    found: float = 0.0
    seconds: float = 0.0
    run_dirs: list[str] = field(default_factory=list)

    def add(self, run_dir, found, seconds):
        self.found, self.seconds = self.found + found, self.seconds + seconds
        self.run_dirs.append(str(run_dir))

    def is_enough(self):
        return self.seconds >= ENOUGH_SECONDS


ENOUGH_SECONDS = 5.0
BOOKED = defaultdict(Booked)  # by process; of the runs since the last time that it was tried


def check_metrics(run_dir):
    """Every key is defined, and of each process that was not restarted every second is accounted for, to 2 % of the
    time of all runs since this was last found.
    """
    lines = metrics_of(run_dir)
    restarted = {event["worker"].replace(" ", "-") for event in events_of(run_dir, "restart")}
    restarted = {"learner" if worker == "learner-0" else worker for worker in restarted}
    seconds = {}
    for line in lines:
        keys = line.keys() - {"step", "model_step", "time"}
        undefined = [key for key in keys if metric_of(key) is None]
        assert not undefined, f"{undefined} are not in pipeline/metrics.py"
        for metric in METRICS:
            assert metric.when or "<" in metric.key or metric.key in keys, f"{metric.key} is missing in {run_dir}"
        for key in keys:
            if key.startswith("time/"):
                process = key.removeprefix("time/").rpartition("_seconds")[0].rpartition("_")[0]
                seconds[process] = seconds.get(process, 0.0) + line[key]
    total = sum(line["sampling/interval_seconds"] for line in lines)
    for process, found in seconds.items():
        if process not in restarted:
            BOOKED[process].add(run_dir, found, total)
            if BOOKED[process].is_enough():
                booked = BOOKED.pop(process)
                assert booked.found == pytest.approx(booked.seconds, rel=0.02), f"{process}: {booked}"


def worker_processes(parent=None):
    """Headway's worker processes; of `parent` (a pid) only, if given."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid", "status"]):
        words = process.info["cmdline"] or []
        is_worker = bool(set(MODULES.values()) & set(words))
        if is_worker and process.info["status"] != psutil.STATUS_ZOMBIE and parent in (None, process.info["ppid"]):
            found.append(process)
    return found
