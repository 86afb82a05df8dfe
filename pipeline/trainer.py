"""AsyncTrainer: what users run. It checks every option, opens the run, and hands out one `Step` per trained batch."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, aclosing, closing, nullcontext
from pathlib import Path
from typing import Any

from pipeline.active_run import ActiveRun
from pipeline.advantages import Batchwise, GroupCentered
from pipeline.config import Adam, ForwardBackwardBatch, GroupCompletion, Truncation
from pipeline.config_checks import warn
from pipeline.config_json import config_json
from pipeline.dataset import check_rows, without_holdout
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.evaluations import Evaluations
from pipeline.evaluator import Evaluation, Evaluator
from pipeline.events import EventLog
from pipeline.json_lines import JsonLines
from pipeline.losses import Loss
from pipeline.make_spec import make_spec
from pipeline.rollout_engine import RolloutEngine
from pipeline.rollout_log import RolloutLog
from pipeline.rollouts import Rollouts
from pipeline.run_directory import make_default_run_dir, make_run_dir
from pipeline.run_spec import RunSpec
from pipeline.sampling_counters import SamplingCounters
from pipeline.schedule import Scheduler, ScheduleRules
from pipeline.trainer_config import TrainerConfig
from pipeline.training_loop import Step, Stopped, TrainingLoop, ValidateBatch
from pipeline.unsupported import refuse_unbuilt_env


class AsyncTrainer:
    """Trains the model of `engine` by reinforcement learning, sampling ahead by at most `max_staleness` policy
    versions.

    max_staleness 0 is synchronous training by the same code. `validate_batch(trajectories, metrics)` is called before
    each update; what it raises ends the run. evaluator: measures held-out rows beside training. run_dir: where the
    run's files go (default `runs/<time>-async` or `-sync`). The other options are those of `TrainerConfig`. Raises
    ConfigError or ConfigTypeError, before any process starts.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        optimizer: Adam,
        loss: Loss,
        completion: GroupCompletion,
        groups_per_step: int,
        advantage: GroupCentered | Batchwise | None = None,
        truncation: Truncation | None = None,
        validate_batch: ValidateBatch | None = None,
        evaluator: Evaluator | None = None,
        run_dir: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(engine, RolloutEngine):
            raise ConfigTypeError(f"engine is {engine!r:.100}; give an rl.RolloutEngine.")
        if validate_batch is not None and not callable(validate_batch):
            raise ConfigTypeError(f"validate_batch is {validate_batch!r:.100}; give a function, or leave it out.")
        if evaluator is not None and not isinstance(evaluator, Evaluator):
            raise ConfigTypeError(f"evaluator is {evaluator!r:.100}; give an rl.Evaluator, or leave it out.")
        self.engine = engine
        self.config = TrainerConfig(
            engine=engine.config,
            optimizer=optimizer,
            loss=loss,
            completion=completion,
            groups_per_step=groups_per_step,
            advantage=advantage if advantage is not None else GroupCentered(),
            truncation=truncation if truncation is not None else Truncation(),
            **options,
        )
        if validate_batch is not None and isinstance(self.config.forward_backward_batch, ForwardBackwardBatch):
            raise ConfigError(
                "validate_batch sees each batch before any of it trains, so ForwardBackwardBatch can't train its first "
                'groups while others sample; leave forward_backward_batch at "auto", or validate_batch out.'
            )
        self.run_dir = run_dir
        self.run_directory: Path | None = None  # of the last run, once it has one
        self.stopped = False  # the last run was stopped before its steps were done
        self.evaluations: list[Evaluation] = []  # of the last run, in order
        self._validate_batch = validate_batch
        self._evaluator = evaluator
        self._loop: TrainingLoop | None = None
        self._opening = False  # the run's processes are being started
        self._stop_asked = asyncio.Event()

    async def run(
        self, rows: Sequence[dict[str, Any]], steps: int, *, description: dict[str, Any] | None = None
    ) -> AsyncIterator[Step]:
        """Train `steps` batches on `rows` (plain dicts), yielding each when its weights are published.

        description: what config.json holds (default: this trainer's options). Raises ConfigError before any process
        starts, and RunError, WorkerDied or TrajectoryError when the run can't go on.
        """
        rows = self._training_rows(rows)
        spec, rules = self._check(len(rows), steps)
        mode = "async" if self.config.max_staleness > 0 else "sync"
        description = description or self._description()
        if self.run_dir is None:
            directory = make_default_run_dir(mode, time.localtime(), description)
        else:
            directory = make_run_dir(self.run_dir, description)
        self.run_directory = directory
        self.stopped, self._stop_asked, self.evaluations = False, asyncio.Event(), []
        # What exists now (modules, rows) outlives the run: walking it in every collection cost a tenth of this process.
        gc.freeze()
        try:
            with (
                closing(EventLog(directory / "events.jsonl", time.monotonic)) as events,
                closing(JsonLines(directory / "metrics.jsonl")) as metrics,
                self._open_results(directory) as results,
            ):
                # aclosing: a caller who leaves the loop early must end the run now, not when garbage is collected.
                async with aclosing(
                    self._steps(spec, rules, rows, directory, events, metrics, results, mode)
                ) as trained:
                    async for step in trained:
                        yield step
        finally:
            gc.unfreeze()

    def request_stop(self) -> None:
        """End the run after the update that has begun; from a signal handler or another task of the run's loop."""
        self._stop_asked.set()
        if self._loop is not None:
            self._loop.request_stop()

    @property
    def waits_for(self) -> str:
        """Whom the trainer waits for now, in words; empty when it is itself at work, or in no run."""
        if self._opening:
            return "the processes to start"
        return self._loop.waits_for if self._loop is not None else ""

    def _training_rows(self, rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The checked rows, without those that are held out."""
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise ConfigTypeError(f"rows is {type(rows).__name__}; give a list of dicts.")
        check_rows(rows)
        if self._evaluator is None:
            return rows
        left = without_holdout(rows, self._evaluator.holdout)
        removed = len(rows) - len(left)
        if removed and not left:
            raise ConfigError(f"All {removed} training rows are in Evaluator.holdout too; give rows that are not.")
        if removed:
            warn(f"{removed} of {len(rows)} training rows are in Evaluator.holdout too, and are left out of training.")
        return left

    def _description(self) -> dict[str, Any]:
        description = config_json(self.config, seed=self.config.engine.seed)
        if self._evaluator is not None:
            description["evaluator"] = self._evaluator.describe()
        return description

    def _check(self, num_rows: int, steps: int) -> tuple[RunSpec, ScheduleRules]:
        config = self.config
        refuse_unbuilt_env(self.engine.env.env_class)
        config.check_run(dataset_rows=num_rows, steps=steps)
        schedule = config.engine.schedule
        rules = ScheduleRules(
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            max_staleness=config.max_staleness,
            steps=steps,
            num_rows=num_rows,
            stale_policy=config.stale_policy,
            admit_ahead=schedule.admit_ahead,
            oversample_factor=schedule.oversample_factor,
            batch_order=config.batch_order,
            repeat_dataset=config.repeat_dataset,
            carry_over=config.completion.on_stragglers == "carry_over",
        )
        return make_spec(self.engine.model, config, evaluates=self._evaluator is not None), rules

    async def _steps(
        self,
        spec: RunSpec,
        rules: ScheduleRules,
        rows: Sequence[dict[str, Any]],
        directory: Path,
        events: EventLog,
        metrics: JsonLines,
        results: JsonLines | None,
        mode: str,
    ) -> AsyncIterator[Step]:
        """The run between its `run` and its `end` event."""
        config, model = self.config, self.engine.model
        scheduler = Scheduler(rules)
        status = "failed"
        run: ActiveRun | None = None
        rollouts: Rollouts | None = None
        evaluations: Evaluations | None = None
        self._log_run(events, rules, mode)
        try:
            self._opening = True
            max_requests = config.engine.schedule.sample_requests
            run = await self._unless_stopped(
                model.open_run(spec, self.engine.env, events, str(directory / "logs"), max_requests)
            )
            self._opening = False
            counters = SamplingCounters()
            rollouts = Rollouts(
                config.engine,
                run,
                model.chat,
                rows,
                config.group_size,
                RolloutLog(events, counters),
                concurrency=config.engine.schedule.concurrency,
                completion=config.completion,
                oldest_first=config.stale_policy == "wait",
                replace_failed=config.on_failure == "replace",
            )
            self._loop = TrainingLoop(config, run, scheduler, rollouts, counters, self._validate_batch)
            if self._evaluator is not None:
                evaluations = Evaluations(
                    self._evaluator,
                    config.engine,
                    run,
                    model.chat,
                    lines=results,
                    done=self.evaluations,
                    waits=self._loop.waits,
                    stop_asked=self._stop_asked,
                    on_failure=rollouts.interrupt,
                    oldest_first=config.stale_policy == "wait",
                )
            while scheduler.batches < rules.steps:
                if evaluations is not None:
                    self._loop.time_account.switch("waiting")  # unless one still runs, for no time
                    await evaluations.launch(scheduler.batches)
                step = await self._loop.step()
                if evaluations is not None:
                    step.metrics.update(evaluations.take_metrics())
                events.flush()
                # Here, so that a full disk is known before the `end` event tells how the run ended.
                metrics.write({"step": step.n, "model_step": step.model_step, "time": events.seconds()} | step.metrics)
                metrics.flush()
                yield step
            if evaluations is not None:
                await evaluations.launch(scheduler.batches, at_end=True)
                await evaluations.finish(scheduler.batches)
            status = "completed"
        except Stopped:
            status, self.stopped = "stopped", True
        except GeneratorExit:  # the caller left its loop
            status, self.stopped = "stopped", True
            raise
        except asyncio.CancelledError:
            status, self.stopped = "stopped", True
            raise
        finally:
            loop, self._loop, self._opening = self._loop, None, False
            # Nested, for a cancellation may come in here too: asyncio.run cancels what its coroutine has left behind.
            try:
                try:
                    if evaluations is not None:
                        await evaluations.stop()
                finally:
                    if rollouts is not None:
                        await rollouts.stop()
            finally:
                try:
                    if run is not None:
                        await model.end_run(run)
                finally:
                    self._log_end(events, scheduler, loop, status)

    async def _unless_stopped(self, opening: Coroutine[Any, Any, ActiveRun]) -> ActiveRun:
        """The opened run; Stopped, with nothing left of it, when a stop is asked for first."""
        task = asyncio.ensure_future(opening)
        stop = asyncio.ensure_future(self._stop_asked.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if not self._stop_asked.is_set():
                return await task
            raise Stopped
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
            if self._stop_asked.is_set() or task.cancelling():
                (opened,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(opened, ActiveRun):  # both happened at once
                    await self.engine.model.end_run(opened)

    def _open_results(self, directory: Path) -> AbstractContextManager[JsonLines | None]:
        """eval.jsonl, if anything is evaluated."""
        return nullcontext() if self._evaluator is None else closing(JsonLines(directory / "eval.jsonl"))

    def _log_run(self, events: EventLog, rules: ScheduleRules, mode: str) -> None:
        config = self.config
        events.log(
            "run",
            mode=mode,
            max_staleness=rules.max_staleness,
            stale_policy=rules.stale_policy,
            on_stragglers=config.completion.on_stragglers,
            groups_per_step=rules.groups_per_step,
            group_size=rules.group_size,
            admit_ahead=rules.admit_ahead,
            oversample_factor=rules.oversample_factor,
            concurrency=config.engine.schedule.concurrency,
            steps=rules.steps,
            version=0,
        )

    @staticmethod
    def _log_end(events: EventLog, scheduler: Scheduler, loop: TrainingLoop | None, status: str) -> None:
        consumed = loop.num_consumed() if loop is not None else 0
        given_up = loop.intake.given_up if loop is not None else Counter()
        events.log(
            "end",
            status=status,
            steps=loop.num_batches if loop is not None else 0,
            admitted=scheduler.admitted,
            consumed=consumed,
            filtered=given_up["filtered"],
            failed=given_up["failed"],
            outstanding=scheduler.admitted - consumed - given_up.total(),
        )


def run(
    trainer: AsyncTrainer, rows: Sequence[dict[str, Any]], steps: int, on_step: Callable[[Step], None] | None = None
) -> list[Step]:
    """`trainer.run` outside asyncio: trains, calls `on_step` with each step, and returns them all."""

    async def collect() -> list[Step]:
        done = []
        async for step in trainer.run(rows, steps):
            if on_step is not None:
                on_step(step)
            done.append(step)
        return done

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none runs here: the usual case
        inside = False
    else:
        inside = True
    if inside:
        raise ConfigError("rl.run was called inside an asyncio loop; there, use `async for step in trainer.run(...)`.")
    return asyncio.run(collect())
