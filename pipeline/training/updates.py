"""One batch's way through the learner: its rows, whole or in chunks, then the gated step into a free slot."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.batches.overlap import MAX_PENDING
from pipeline.batches.rows import Rows
from pipeline.errors import RunError
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.learner.learner_client import LEARNER_SECONDS
from workers.messages import Published


@dataclass(frozen=True, slots=True)
class Counts:
    """Predictions of a chunk that the learner's means speak for."""

    generated: int
    trained: int  # that have a place in the loss
    with_advantage: int

    @classmethod
    def of(cls, rows: Rows) -> "Counts":
        return cls(*(int(np.count_nonzero(part)) for part in (rows.versions >= 0, rows.scales, rows.weights)))

    def behind(self, metric: str) -> int:
        """How many predictions the mean `metric` was taken over."""
        if metric in ("train/kl", "train/entropy"):
            return self.trained
        return self.with_advantage if metric.startswith("importance/capped_") else self.generated


class Updates:
    """`submit` once or for each chunk, then `step`; `begin` starts the next batch."""

    def __init__(self, run: ActiveRun, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._batch, self._began, self._gradient_scale = 0, 0.0, 1.0  # of the latest step
        self.begin()

    def begin(self, due: str = "optim") -> None:
        """due: the first of its events that the log lacks, of "optim" and "published"; empty: none."""
        self._due = due
        self.submitted: list[Rows] = []
        self._chunks: list[tuple[asyncio.Future[dict[str, float]], Counts]] = []
        self._pending: deque[asyncio.Future] = deque()

    @property
    def num_chunks(self) -> int:
        """Chunks of this batch that the learner was sent."""
        return len(self._chunks)

    async def submit(self, batch: int, rows: Rows) -> None:
        """Send rows, the first ones with the word to zero the gradients. Waits while MAX_PENDING are unanswered.

        A chunk that fails ends the learner, and with it the run: no update follows.
        """
        while self._pending and (len(self._pending) >= MAX_PENDING or self._pending[0].done()):
            try:
                async with asyncio.timeout(LEARNER_SECONDS):
                    await self._pending.popleft()
            except TimeoutError:
                raise RunError(
                    f"The learner has not answered for gradients of batch {batch} for {LEARNER_SECONDS:g} s."
                ) from None
        future = await self._run.learner.forward_backward(batch, rows, zero_gradients=not self._chunks)
        self.submitted.append(rows)
        self._chunks.append((future, Counts.of(rows)))
        self._pending.append(future)

    async def step(
        self, batch: int, *, slot: int, groups: Sequence[int], epoch: int, lr: float, gradient_scale: float
    ) -> dict[str, float]:
        """The gate, the step, the new weights in their slot. Returns the learner's metrics."""
        run, version = self._run, self._run.slots.committed
        # The step follows at once: the learner works in order, and needs no word from here in between.
        self._batch, self._began, self._gradient_scale = batch, self._clock(), gradient_scale
        published = await run.learner.optim_step(
            batch,
            from_version=version,
            slot=slot,
            groups=groups,
            epoch=epoch,
            lr=lr,
            gradient_scale=gradient_scale,
        )
        # It answers in order, so all of them are done: one that is not would be waited for for ever.
        metrics = merge_chunks([(future.result(), counts) for future, counts in self._chunks], gradient_scale)
        self._note(published)
        return metrics | _without_bytes(published.metrics)

    async def settle(self) -> dict[str, float] | None:
        """When `step` was cut off, by a cancellation or by the run's failure: wait for the learner's answer, and note
        the update as any other. Returns the learner's metrics, without those of gradients that nobody was told of;
        None if there was no such update. Raises WorkerDied, or RunError after a time.
        """
        published = await self._run.learner.settle()
        if published is None:
            return None
        self._note(published)
        told = [(future, counts) for future, counts in self._chunks if future.done() and not future.cancelled()]
        chunks = [(future.result(), counts) for future, counts in told if future.exception() is None]
        return merge_chunks(chunks, self._gradient_scale) | _without_bytes(published.metrics)

    def _note(self, published: Published) -> None:
        """The new version, in the log and for whoever samples."""
        events, version = self._run.events, published.version
        seconds = round(self._clock() - self._began, 6)
        if self._due == "optim":
            events.log("optim", step=self._batch, **{"from": version - 1, "to": version}, seconds=seconds)
        self._run.slots.published(version, published.slot)
        seconds = round(published.metrics["train/publish_seconds"], 6)
        num_bytes = int(published.metrics["publish_bytes"])
        if self._due:
            events.log("published", version=version, slot=published.slot, bytes=num_bytes, seconds=seconds)


def _without_bytes(metrics: Mapping[str, float]) -> dict[str, float]:
    """The learner's metrics as users get them."""
    return {name: value for name, value in metrics.items() if name != "publish_bytes"}


def merge_chunks(chunks: Sequence[tuple[dict[str, float], Counts]], gradient_scale: float) -> dict[str, float]:
    """The learner's metrics of a batch from those of its chunks.

    Losses, tokens and seconds add up, the loss times the factor that the chunks' weights leave out; of each maximum the
    largest counts; everything else is a mean, weighted by the predictions behind it.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics, _ in chunks for name in metrics):
        values = [(metrics[name], counts.behind(name)) for metrics, counts in chunks if name in metrics]
        if name == "train/loss":
            merged[name] = gradient_scale * sum(value for value, _ in values)
        elif name == "train/tokens" or name.endswith("_seconds"):
            merged[name] = sum(value for value, _ in values)
        elif "max" in name.rpartition("/")[2].split("_"):
            merged[name] = max(value for value, _ in values)
        else:
            merged[name] = sum(value * count for value, count in values) / max(1, sum(count for _, count in values))
    return merged
