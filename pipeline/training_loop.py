"""The trainer's loop over batches: admit, wait for a batch that may train, train it, count it.

The order within a step is the protocol of the version bound. The reservations of all outstanding groups are in the
ledger before the learner is asked to step, the learner's gate reads them, and nothing is admitted, pinned or counted
at the new version before its answer says that the weights are in their slot.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.active_run import ActiveRun
from pipeline.batches import TrainingBatch, make_batch
from pipeline.errors import RunError
from pipeline.learning_rate import learning_rate
from pipeline.rollouts import Rollouts
from pipeline.sampling_counters import SamplingCounters
from pipeline.schedule import Batch, Blocked, Scheduler
from pipeline.trainer_config import TrainerConfig
from pipeline.trajectory import Group, Trajectory
from pipeline.waits import REPORT_SECONDS, Culprit, Waits

ValidateBatch = Callable[[Sequence[Trajectory], dict[str, float]], None]


class Stopped(Exception):
    """The run was asked to stop, and no update had begun."""


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that was trained. `n` counts batches from 1; `model_step` is the policy version after it."""

    n: int
    model_step: int
    metrics: dict[str, float]


class TrainingLoop:
    """One run's batches, one `step` after the other."""

    def __init__(
        self,
        config: TrainerConfig,
        run: ActiveRun,
        scheduler: Scheduler,
        rollouts: Rollouts,
        counters: SamplingCounters,
        validate_batch: ValidateBatch | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._run = run
        self._scheduler = scheduler
        self._rollouts = rollouts
        self._counters = counters
        self._validate_batch = validate_batch
        self._clock = clock
        self._received: dict[int, Group] = {}
        self._stop = False
        self.waits = Waits(run.events, clock)
        self.num_batches = 0  # that have begun to train: told in a `batch` event
        self.num_consumed = 0  # groups in them
        self._restarts_told = 0
        self._training = 0  # the batch that the learner has; 0: none
        self._epoch = 0  # of the reservations in the ledger, at this batch's admission

    def request_stop(self) -> None:
        """End after the update that has begun; a wait for the next batch ends at once, with Stopped."""
        self._stop = True
        self._rollouts.interrupt(Stopped())

    @property
    def waits_for(self) -> str:
        """Whom the trainer waits for now, in words; empty when it is itself at work."""
        if self._training:
            return f"the learner, which trains batch {self._training}"
        culprit = self.waits.current
        return "" if culprit is None else culprit.detail

    async def step(self) -> Step:
        """One batch. Raises Stopped, or what ended the run."""
        if self._stop:
            raise Stopped
        if self._run.failure is not None:
            raise self._run.failure
        n = self._scheduler.batches + 1
        started = self._clock()
        self.waits.reset()
        self._admit()
        batch = await self._next_batch(n)
        selected = self._clock()
        groups = [self._received.pop(group) for group in batch.groups]
        training = self._make(groups)
        metrics = training.metrics
        if self._validate_batch is not None:
            self._validate_batch([one for group in groups for one in group.trajectories], metrics)
        self._log_batch(n, batch, training)
        updated = training.rows.num_rows > 0
        metrics["train/updated"] = int(updated)
        metrics["train/backward_chunks"] = int(updated)
        metrics["train/gradient_scale"] = training.gradient_scale
        metrics["train/lr"] = learning_rate(self._config.optimizer, n - 1, self._scheduler.rules.steps)
        if updated:
            self._training = n
            metrics |= await self._update(n, batch, training)
            self._training = 0
        self._scheduler.commit(batch, updated)
        self._run.write_reservations(self._scheduler.reservations())
        now = self._clock()
        metrics["train/batch_seconds"] = now - started
        metrics["train/seconds"] = now - selected
        metrics["train/tokens_per_second"] = metrics["train/tokens"] / max(now - started, 1e-9)
        busy = [metrics.get(f"train/{part}_seconds", 0.0) for part in ("forward", "backward", "optimizer", "publish")]
        metrics["time/learner_busy_seconds"] = sum(busy)
        metrics |= self._schedule_metrics(groups)
        return Step(n, self._scheduler.version, metrics)

    # --- admission and waiting -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        admissions = self._scheduler.admit()
        self._epoch = self._run.write_reservations(self._scheduler.reservations())
        for admission in admissions:
            self._run.events.log("admitted", group=admission.group, row=admission.row, version=admission.version)
        self._rollouts.start(admissions)

    async def _next_batch(self, n: int) -> Batch:
        """Pull finished groups one at a time until the schedule names a batch."""
        while isinstance(choice := self._scheduler.select(), Blocked):
            if self._scheduler.pull_counts_as_wait():
                self.waits.begin_counting(self._culprit(choice).why)
            group = await self._pull(n, choice)
            self.waits.end_counting()
            self._received[group.group] = group
            self._scheduler.receive(group.group)
        self.waits.end()
        return choice

    async def _pull(self, n: int, blocked: Blocked) -> Group:
        """The next finished group, in order of completion. Raises what ended the run."""
        completed = self._rollouts.completed
        if completed.empty():
            self.waits.begin(n, self._culprit(blocked))
        while True:
            try:
                result = completed.get_nowait() if not completed.empty() else await self._get(completed)
                break
            except TimeoutError:
                self.waits.report(self._culprit(blocked))
        if isinstance(result, BaseException):
            self.waits.end()
            raise result
        return result

    @staticmethod
    async def _get(completed: asyncio.Queue) -> Group | BaseException:
        async with asyncio.timeout(REPORT_SECONDS):
            return await completed.get()

    def _culprit(self, blocked: Blocked) -> Culprit:
        trajectory, doing = self._rollouts.doing(blocked.group)
        if blocked.why == "ready":
            detail = f"too few finished groups; group {blocked.group} is the oldest unfinished one ({doing})"
            return Culprit("ready", blocked.group, trajectory, detail)
        deadline = self._scheduler.deadline(blocked.group)
        detail = f"group {blocked.group} must train by version {deadline}; trajectory {trajectory} is in: {doing}"
        return Culprit(doing, blocked.group, trajectory, detail)

    # --- training ------------------------------------------------------------------------------------------------

    def _make(self, groups: Sequence[Group]) -> TrainingBatch:
        config = self._config
        return make_batch(
            groups,
            version=self._scheduler.version,
            advantage=config.advantage,
            normalize=config.loss.normalize,
            truncation=config.truncation,
            min_members=config.completion.min_members,
            max_age=config.max_staleness,
            train_all=config.trains_without_advantage,
        )

    def _log_batch(self, n: int, batch: Batch, training: TrainingBatch) -> None:
        self._run.events.log(
            "batch",
            step=n,
            version=self._scheduler.version,
            groups=list(batch.groups),
            tokens=training.num_generated,
            masked=training.num_masked,
            dropped=training.num_dropped,
            age_min=training.age_min,
            age_max=training.age_max,
            updated=training.rows.num_rows > 0,
        )
        self.num_batches = n
        self.num_consumed += len(batch.groups)

    async def _update(self, n: int, batch: Batch, training: TrainingBatch) -> dict[str, float]:
        """Gradients, the gate, the step, the new weights in their slot. Returns the learner's metrics."""
        run, version = self._run, self._scheduler.version
        slot = run.slots.slot_for_next()
        if slot is None:
            raise RunError(f"All {run.spec.num_slots} weight slots are leased at version {version}: a lease was lost.")
        lengths, tokens, weights, scales, behaviour_logprobs, versions = training.rows.payload()
        gradients = await run.learner.forward_backward(
            n,
            lengths=lengths,
            tokens=tokens,
            weights=weights,
            scales=scales,
            behaviour_logprobs=behaviour_logprobs,
            versions=versions,
        )
        # The step follows at once: the learner works in order, and needs no word from here in between.
        began = self._clock()
        published = await run.learner.optim_step(
            n,
            from_version=version,
            slot=slot,
            groups=batch.groups,
            epoch=self._epoch,
            lr=training.metrics["train/lr"],
            gradient_scale=training.gradient_scale,
        )
        metrics = dict(await gradients)
        metrics |= published.metrics
        num_bytes = int(metrics.pop("publish_bytes"))
        run.events.log(
            "optim", step=n, **{"from": version, "to": published.version}, seconds=round(self._clock() - began, 6)
        )
        run.publish(published)
        seconds = metrics["train/publish_seconds"]
        run.events.log(
            "published", version=published.version, slot=published.slot, bytes=num_bytes, seconds=round(seconds, 6)
        )
        return metrics

    def _schedule_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        waits = self.waits
        restarts, self._restarts_told = self._run.num_restarts - self._restarts_told, self._run.num_restarts
        return {
            "staleness/wait_seconds": waits.bound_seconds,
            "staleness/wait_count": waits.bound_count,
            "staleness/reserved_groups": self._scheduler.reserved_groups,
            **{f"staleness/wait_seconds/{cause}": seconds for cause, seconds in waits.by_cause.items()},
            "staleness/slot_wait_seconds": 0,
            "groups/failed": 0,
            "groups/filtered": 0,
            "groups/deadline_frac": sum(group.closed_by_deadline for group in groups) / len(groups),
            "groups/mean_wait_seconds": sum(group.seconds for group in groups) / len(groups),
            "throughput/queue_depth": self._rollouts.completed.qsize() + len(self._received),
            "recovery/retries": 0,
            "recovery/restarts": restarts,
            **self._counters.take(),
        }
