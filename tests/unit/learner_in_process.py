"""A run's learner, all of it but the process. It dies at named points; the supervisor's side is the real one."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dying_learner import Dying
from test_model import LLAMA
from test_packing import make_rows

from pipeline.batches.rows import Rows
from pipeline.processes.learner.learner_history import PastUpdate
from pipeline.processes.learner.run_learner import RunLearner
from pipeline.processes.learner.slot_table import SlotTable
from pipeline.processes.worker.run_blocks import RunBlocks
from pipeline.processes.worker.run_ends import RunEnds
from pipeline.run_spec import RunSpec
from shm.errors import HeadwayError
from workers.attach import Attachments
from workers.errors import WorkerDied, WorkerFailed
from workers.message_codec import decode, encode
from workers.messages import Message, Published

LR = 0.01


def spec(**changes: Any) -> RunSpec:
    values = {
        "model": replace(LLAMA, vocab_size=50, num_layers=1),
        "seed": 3,
        "max_staleness": 2,
        "stale_policy": "wait",
        "groups_per_step": 2,
        "group_size": 2,
        "num_slots": 4,
        "num_samplers": 0,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_ids": []},
        "optimizer": {"weight_decay": 0.1, "grad_clip_norm": 1.0},
        "loss": {"name": "CISPO", "eps_max": 6.0},
        "concurrency": 4,
        "max_generated_tokens": 64,
        "max_context_tokens": 64,
        "kv_tokens": 64,
        "reply_tokens": 64,
        "max_batch_tokens": 64,
        "micro_batch_tokens": 24,
        "sampler_threads": 1,
        "learner_threads": 1,
        "sampler_devices": [],
        "check_weights": True,
    }
    return RunSpec(**(values | changes))


def some_rows(seed: int, version: int) -> Rows:
    """Of segments that are at most one update old at `version`."""
    rows = make_rows([5, 9, 3, 12], seed=seed)
    versions = np.where(rows.versions < 0, -1, np.maximum(0, version - rows.versions % 2)).astype(np.int32)
    whose = np.zeros(4, dtype=np.int32)
    return Rows(
        rows.lengths, rows.tokens, rows.weights, rows.scales, rows.behaviour_logprobs, versions, whose, whose, whose
    )


@dataclass
class Recorded:
    """A history in memory: what the journal and the checkpoints of a run keep."""

    past: list[PastUpdate] = field(default_factory=list)
    saved: dict[int, Path | None] = field(default_factory=lambda: {0: None})
    asked: list[tuple[int, int]] = field(default_factory=list)  # (base, to) of each replay

    def base(self, oldest, is_cancelled):
        version = max(version for version in self.saved if version <= oldest)
        return version, self.saved[version]

    def updates(self, after, to):
        self.asked.append((after, to))
        return (update for update in self.past if after <= update.from_version < to)


class Killed(BaseException):
    """The process is gone at this very point."""


class Channel:
    """The learner's end: what it sends comes to `deliver` in a later tick."""

    incarnation, receive = 0, None

    def __init__(self, deliver: Callable[[Message], None]) -> None:
        self._deliver = deliver

    def send(self, message):
        asyncio.get_running_loop().call_soon(self._deliver, through_the_wire(message))


class InProcess:
    """What RunLearner needs of RunWorkers, and the handle of the learner, in one.

    plan: (point, batch, whether in a replay) of each death, in order.
    """

    name, pid, max_restarts = "learner 0", 1, 100

    def __init__(self, plan: Iterable[tuple[str, int, bool]] = ()) -> None:
        self.plan = deque(plan)
        self.failure: BaseException | None = None
        self.learner = self
        self.worker: Dying | None = None
        self._attached: Attachments | None = None
        self._arrived: deque[Message] = deque()
        self.on_message = self.on_error = self.on_death = lambda what: None

    async def start(self, handle, config, on_death):
        await asyncio.sleep(0)
        self._attached = Attachments(config)
        try:
            self.worker = Dying(Channel(self._deliver), config, self._attached, self.reach)
            detail = self.worker.begin()
        except Killed:
            self._end()
            raise WorkerDied("It was killed in its start.") from None
        self.on_death = on_death
        return detail

    def respawn(self, handle):
        assert self.worker is None, "the one before is not dead"

    def send(self, message):
        if self.worker is not None:
            self._arrived.append(through_the_wire(message))
            asyncio.get_running_loop().call_soon(self._serve, self.worker)

    def kill(self):
        """From outside, while it waits for a message."""
        self._end()
        self.on_death(WorkerDied("It was killed."))

    def discard(self):
        """As a handle's: nobody is told."""
        if self.worker is not None:
            self._end()

    def reach(self, point, batch, replays):
        if self.plan and self.plan[0] == (point, batch, replays):
            self.plan.popleft()
            raise Killed

    def _serve(self, worker):
        if self.worker is not worker:  # it has died since
            return
        message = self._arrived.popleft()
        try:
            worker.handle(message)
        except Killed:
            self._end()
            asyncio.get_running_loop().call_soon(self.on_death, WorkerDied("It was killed."))
        except HeadwayError as error:
            self._end()
            asyncio.get_running_loop().call_soon(self.on_death, WorkerFailed(str(error)))

    def _deliver(self, message):
        try:
            self.on_message(message)
        except Exception as error:
            self.on_error(error)

    def _end(self):
        self.worker = None
        self._arrived.clear()
        self._attached.close()


def through_the_wire(message: Message) -> Message:
    return decode(encode(message, incarnation=0))[1]


class Events:
    """The log of a run, as far as a learner writes to it."""

    def __init__(self) -> None:
        self.restarts = 0

    def log(self, event, **fields):
        assert event == "restart"
        self.restarts += 1


class Training:
    """A run's supervisor as far as its learner is concerned, which trains given batches. Use it in `with`."""

    def __init__(self, spec: RunSpec, workers: InProcess, history: Recorded | None) -> None:
        self.workers, self.history, self.events = workers, history, Events()
        self.blocks = RunBlocks(spec, run_id=1)
        self.slots = SlotTable(spec.num_slots, self.blocks.ledger.write_lease, lambda version: None)
        self.failure: BaseException | None = None
        self.tasks: list[asyncio.Task] = []
        self.slot_events: list[str] = []
        self.learner = RunLearner(
            spec,
            workers,
            self.blocks,
            self.slots,
            self.events,
            RunEnds(self.fail, self.fail, self._spawn),
            history=history,
            slots_lost=lambda: self.slot_events.append("lost"),
            slots_made=lambda fields: self.slot_events.append("made"),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.blocks.close()

    def fail(self, error):
        if self.failure is None:
            self.failure = self.workers.failure = error
            self.learner.fail(error)

    def _spawn(self, coroutine):
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.append(task)
        task.add_done_callback(lambda task: task.exception() and self.fail(task.exception()))

    async def step(self, n: int, chunks: list[Rows]) -> dict[str, float]:
        """Batch `n`, as the trainer has it trained; returns its metrics."""
        published, metrics = await self.publish(n, chunks)
        self.slots.published(published.version, published.slot)
        return metrics

    async def publish(self, n: int, chunks: list[Rows]) -> tuple[Published, dict[str, float]]:
        """As far as the learner's answer: its record is kept before the step is asked for, the slots aren't told."""
        client, version = self.learner.client, self.slots.committed
        futures = [
            await client.forward_backward(n, rows, zero_gradients=number == 0) for number, rows in enumerate(chunks)
        ]
        if self.history is not None:
            self.history.past.append(PastUpdate(n, version, chunks, LR / n, 0.5))
        published = await client.optim_step(
            n,
            from_version=version,
            slot=self.slots.slot_for_next(),
            groups=[],
            epoch=0,
            lr=LR / n,
            gradient_scale=0.5,
        )
        metrics = published.metrics | {f"{i}/{k}": v for i, f in enumerate(futures) for k, v in (await f).items()}
        return published, {name: value for name, value in metrics.items() if not name.endswith("_seconds")}

    async def settled(self) -> None:
        """When nobody is being started any more."""
        while self.tasks:
            await asyncio.wait([self.tasks.pop()])

    def weights(self) -> torch.Tensor:
        """Of the committed version, as samplers see them."""
        slot = self.slots.slot_of(self.slots.committed)
        return self.workers.worker._slots.flat(slot).clone()

    def state(self) -> dict[str, torch.Tensor]:
        """What the learner holds: weights, optimizer, the reference of its KL divergence."""
        trainee = self.workers.worker._trainee
        reference = {} if trainee._reference is None else trainee._reference.named
        held = {"weights": trainee.flat, **trainee.optimizer_state} | reference
        return {name: tensor.detach().clone() for name, tensor in held.items()}
