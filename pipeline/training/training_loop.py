"""The trainer's loop over batches: admit, wait for a batch that may train, train it, count it.

The order within a step is the protocol of the version bound. The reservations of all outstanding groups are in the
ledger before the learner is asked to step, the learner's gate reads them, and nothing is admitted, pinned or counted
at the new version before its answer says that the weights are in their slot.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import TrainingBatch, make_batch
from pipeline.batches.overlap import StreamedBatch, overlap_of
from pipeline.batches.rows import Rows
from pipeline.data.mixed_rows import MixedRows
from pipeline.errors import RunError
from pipeline.journal.recorder import Recorder
from pipeline.journal.records import BatchRecord, chunk_of, rows_of
from pipeline.journal.run_state import TrainingNow
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.opening import Stopped
from pipeline.processes.process_metrics import TimeAccount
from pipeline.rollouts.rollouts import Rollouts
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.schedule import Batch, Blocked, Scheduler
from pipeline.stalls.waits import Waits
from pipeline.trainer_config import TrainerConfig
from pipeline.training.batch_waits import BatchWaits
from pipeline.training.culprits import Culprits
from pipeline.training.intake import DataUsedUp, Intake
from pipeline.training.learning_rate import learning_rate
from pipeline.training.mix_metrics import mix_metrics
from pipeline.training.received import Received
from pipeline.training.step_metrics import StepMetrics, timing
from pipeline.training.trajectory_log import TrajectoryLog
from pipeline.training.updates import Updates
from pipeline.trajectory import Group, Trajectory

ValidateBatch = Callable[[Sequence[Trajectory], dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that was trained. `n` counts batches from 1; `model_step` is the policy version after it."""

    n: int
    model_step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Stepping:
    """A batch from its record on. metrics: of the batch itself; started, selected: by the loop's clock."""

    record: BatchRecord
    groups: Sequence[Group]
    metrics: dict[str, float]
    started: float
    selected: float


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
        *,
        recorder: Recorder,
        trajectory_log: TrajectoryLog | None = None,
        mix: MixedRows | None = None,
    ) -> None:
        """mix: the rows, if they are for several environments."""
        self._config = config
        self._run = run
        self._scheduler = scheduler
        self._rollouts = rollouts
        self._validate_batch = validate_batch
        self._trajectory_log = trajectory_log
        self._mix = mix
        self._recorder = recorder
        self._clock = clock
        self._stop = False
        self.waits = Waits(run.events, clock, lambda: run.standing_still)
        self.intake = Intake(config, run, scheduler, rollouts, recorder)
        self.received = Received()
        self.time_account = TimeAccount(clock)
        self._metrics = StepMetrics(run, scheduler, self.intake, self.received, self.waits, counters, self.time_account)
        self._updates = Updates(run, clock)
        self._overlap = overlap_of(config, validates=validate_batch is not None)
        self._batch_rules = BatchRules.of(config, self._overlap)
        self._batch_waits = BatchWaits(
            self.intake,
            run.slots,
            Culprits(config, scheduler, rollouts, run.spec.num_slots),
            self.waits,
            self.time_account,
            clock,
            ended_by=self._ended_by,
        )
        self._training = 0  # the batch that the learner has; 0: none
        self._stepping: _Stepping | None = None  # the latest batch whose record is whole

    def request_stop(self) -> None:
        """End after the update that has begun; a wait for the next batch ends at once, with Stopped."""
        self._stop = True
        self.intake.close(Stopped())
        self._run.slots.lease_returned.set()  # a wait for a slot ends, too

    @property
    def waits_for(self) -> str:
        """Whom the trainer waits for now, in words; empty when it is itself at work."""
        if self._training and self._run.learner.is_away:
            return f"the learner, which died and is brought back to version {self._scheduler.version}"
        if self._training:
            return self.waits.with_processes(f"the learner, which trains batch {self._training}")
        return self.waits.words

    def state(self) -> dict[str, Any]:
        """For a report: the schedule, and what the rollouts are at."""
        scheduler = self._scheduler
        return {
            "version": scheduler.version,
            "batches": scheduler.batches,
            "batch_with_learner": self._training,
            "admitted": scheduler.admitted,
            "results_pending": scheduler.pending,
            "results_not_pulled": self.intake.depth,
            "reserved_groups": scheduler.reserved_groups,
            "reservation_epoch": self.intake.epoch,
            "trajectories": self._rollouts.state(),
        }

    async def settle(self) -> Step | None:
        """In a run that was cut off in an update: count it, when the learner has answered. Returns what it did; None if
        there was no such update. Raises WorkerDied, or RunError after a time.
        """
        metrics = await self._updates.settle()
        return None if metrics is None else self._finish(self._stepping, metrics)

    async def step(self) -> Step:
        """One batch. Raises Stopped, or what ended the run."""
        self.time_account.switch("busy")
        try:
            return await self._step()
        finally:
            self.time_account.switch("idle")

    async def take_again(self, begun: TrainingNow, due: str) -> Step:
        """The step of a batch that an earlier run had begun: its record says what it trains. due: what the log lacks of
        it, "optim" and "published", or only the latter, or (empty) nothing.
        """
        self.time_account.switch("busy")
        try:
            return await self._take_again(begun, due)
        finally:
            self.time_account.switch("idle")

    async def _step(self) -> Step:
        self._check_goes_on()
        n = self._begin()
        started = self._clock()
        self.intake.admit()
        streamed = None
        if self._overlap is not None:
            streamed = StreamedBatch(self._overlap, self._scheduler.version, self._batch_rules)
        batch = await self._next_batch(n, streamed)
        selected = started if streamed is not None else self._clock()
        groups = self.received.groups(batch)
        rest, training = self._make_batch(groups) if streamed is None else streamed.flush(groups)
        if training.mistake:
            raise RunError(training.mistake)
        if self._validate_batch is not None:
            self._validate_batch([one for group in groups for one in group.trajectories], training.metrics)
        slot = await self._batch_waits.free_slot(n) if training.rows.num_rows > 0 else None
        record = self._record(n, batch, training, [*self._updates.submitted, *rest])
        if self._trajectory_log is not None:
            # Before the record: the journal has no conversations, so a batch that is taken again could not be told of.
            self._trajectory_log.write(n, self._scheduler.version, groups, training.advantages)
        self._recorder.batch(record)
        return await self._train(record, groups, rest, slot, training.metrics, started=started, selected=selected)

    async def _take_again(self, begun: TrainingNow, due: str) -> Step:
        self._check_goes_on()
        record = begun.record
        n, started = self._begin(due), self._clock()
        for group in begun.groups:
            self._receive(group)
        metrics = self._make(begun.groups).metrics
        slot = await self._batch_waits.free_slot(n) if record.updated else None
        chunks = [rows_of(chunk, begun.trajectories) for chunk in record.chunks]
        return await self._train(record, begun.groups, chunks, slot, metrics, started=started, selected=started)

    def _begin(self, due: str = "optim") -> int:
        """The number of the batch that is due."""
        self.waits.reset()
        self._updates.begin(due)
        return self._scheduler.batches + 1

    async def _train(
        self,
        record: BatchRecord,
        groups: Sequence[Group],
        rest: Sequence[Rows],
        slot: int | None,
        metrics: dict[str, float],
        *,
        started: float,
        selected: float,
    ) -> Step:
        """The batch's update, and what it did. rest: the rows that the learner does not have yet; slot: of the new
        version, None if nothing has a gradient.
        """
        n = record.step
        self.received.consume(Batch(record.groups, record.members))
        self._stepping = _Stepping(record, groups, metrics, started, selected)
        found: dict[str, float] = {}
        if slot is not None:
            for rows in rest:
                await self._submit(n, rows)
            self._training = n
            found = await self._updates.step(
                n,
                slot=slot,
                groups=record.groups,
                epoch=self.intake.epoch,
                lr=record.lr,
                gradient_scale=record.gradient_scale,
            )
            self._training = 0
        return self._finish(self._stepping, found)

    def _finish(self, stepping: "_Stepping", found: dict[str, float]) -> Step:
        """The batch is trained. found: the learner's metrics, if it was an update."""
        record = stepping.record
        self._scheduler.commit(Batch(record.groups, record.members), record.updated)
        self._recorder.state.finish_batch()
        self.intake.write_reservations()
        metrics = stepping.metrics | {
            "train/updated": int(record.updated),
            "train/gradient_scale": record.gradient_scale,
            "train/lr": record.lr,
            "train/backward_chunks": self._updates.num_chunks,
            **found,
        }
        now = self._clock()
        metrics |= timing(metrics, batch_seconds=now - stepping.started, seconds=now - stepping.selected)
        metrics |= self._metrics.take(stepping.groups)
        if self._mix is not None:
            metrics |= mix_metrics(self._mix, stepping.groups)
        return Step(record.step, self._scheduler.version, metrics)

    def _check_goes_on(self) -> None:
        if (error := self._ended_by()) is not None:
            raise error
        if self._scheduler.finished:
            done, replaced = self._scheduler.batches, self._scheduler.replaced
            raise RunError(
                f"The data was used up after {done} of {self._scheduler.rules.steps} batches: {replaced} groups were "
                "given up, and no row was left to replace them. Ask for fewer steps, or set repeat_dataset."
            )

    def _ended_by(self) -> BaseException | None:
        """What keeps another update from beginning."""
        return Stopped() if self._stop else self._run.failure

    async def _next_batch(self, n: int, streamed: StreamedBatch | None) -> Batch:
        """Pull finished groups one at a time until the schedule names a batch; with overlap, train meanwhile."""
        while isinstance(choice := self._scheduler.select(), Blocked):
            counts = self._scheduler.pull_counts_as_wait()
            result = await self._batch_waits.next_result(n, choice, counts=counts)
            if isinstance(result, DataUsedUp):
                self._check_goes_on()
                continue
            self._receive(result)
            for rows in streamed.add(result) if streamed is not None else ():
                await self._submit(n, rows)
        self.waits.end()
        return choice

    def _receive(self, result: Group) -> None:
        """A result has been pulled."""
        self.received.add(result)
        # A group handed over at once is the schedule's affair as a whole: its members need no names. Under `wait` none
        # comes in parts, but one that closed before all members had started is short.
        whole = result.final and len(result.trajectories) == self._config.group_size
        whole |= self._config.stale_policy == "wait"
        self._scheduler.receive(result.group, None if whole else result.members, result.final)

    async def _submit(self, n: int, rows: Rows) -> None:
        """Hand the learner rows of batch `n`; waits for it while too much of the batch is with it already."""
        self._training = n
        await self._updates.submit(n, rows)
        self._training = 0

    def _make_batch(self, groups: Sequence[Group]) -> tuple[list[Rows], TrainingBatch]:
        """The batch in one piece."""
        training = self._make(groups)
        return [training.rows], training

    def _make(self, groups: Sequence[Group]) -> TrainingBatch:
        return make_batch(groups, self._scheduler.version, self._batch_rules)

    def _record(self, n: int, batch: Batch, training: TrainingBatch, chunks: Sequence[Rows]) -> BatchRecord:
        """All that the batch's update depends on."""
        updated = training.rows.num_rows > 0
        return BatchRecord(
            step=n,
            version=self._scheduler.version,
            groups=batch.groups,
            members=batch.members,
            updated=updated,
            lr=learning_rate(self._config.optimizer, n - 1, self._scheduler.rules.steps),
            gradient_scale=training.gradient_scale,
            chunks=tuple(chunk_of(rows) for rows in chunks) if updated else (),
            tokens=training.num_generated,
            masked=training.num_masked,
            dropped=training.num_dropped,
            age_min=training.age_min,
            age_max=training.age_max,
        )
