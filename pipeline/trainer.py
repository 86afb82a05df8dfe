"""AsyncTrainer: what users run. It checks every option, opens the run, and hands out one `Step` per trained batch."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.checkpoints.checkpoints import Checkpoints, require_room
from pipeline.checkpoints.model_files import own_model_files, read_model_files
from pipeline.config import Adam, ForwardBackwardBatch, GroupCompletion, Truncation
from pipeline.config_checks import is_plain_function, refuse_unknown
from pipeline.data.split_rows import without_holdout
from pipeline.dataset import check_rows, rows_digest
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.losses import Loss
from pipeline.memory.make_spec import make_rules, make_spec
from pipeline.models.model_digest import files_digest, weights_digest
from pipeline.models.model_directory import ModelSource
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.run_dir.config_json import config_json
from pipeline.run_dir.run_directory import (
    make_default_run_dir,
    make_run_dir,
    one_run_dir,
    record_changes,
    refuse_other_place,
)
from pipeline.run_dir.run_lock import RunLock
from pipeline.run_spec import RunSpec
from pipeline.schedule import ScheduleRules
from pipeline.stalls.run_report import moves_of, run_report
from pipeline.stalls.stall_watch import StallWatch
from pipeline.trainer_config import TrainerConfig
from pipeline.training.inner_generator import InnerGenerator
from pipeline.training.open_files import open_files
from pipeline.training.resumption import find_run, read_resumption
from pipeline.training.run_plan import RunPlan
from pipeline.training.training_loop import Step, ValidateBatch
from pipeline.training.training_run import TrainingRun
from pipeline.user_warnings import warn


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
        if validate_batch is not None and not is_plain_function(validate_batch):
            raise ConfigTypeError(f"validate_batch is {validate_batch!r:.100}; give a plain function, or leave it out.")
        if evaluator is not None and not isinstance(evaluator, Evaluator):
            raise ConfigTypeError(f"evaluator is {evaluator!r:.100}; give an rl.Evaluator, or leave it out.")
        refuse_unknown(AsyncTrainer, TrainerConfig, options)
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
        self.run_dir = one_run_dir(run_dir, self.config.checkpointing)
        if self.config.checkpointing.keep_best and evaluator is None:
            raise ConfigError(
                f"Checkpointing.keep_best is {self.config.checkpointing.keep_best}, but nothing measures which "
                "checkpoints are the best; give an evaluator, or leave keep_best out."
            )
        self.run_directory: Path | None = None  # of the last run, once it has one
        self._validate_batch = validate_batch
        self._evaluator = evaluator
        self._run: TrainingRun | None = None  # the last one
        self._checkpoints: Checkpoints | None = None  # its
        self.was_complete = False  # what the last run was to resume had all its steps: nothing was done
        self._with_caller = False  # between two batches: nothing need move as long as the caller likes

    async def run(
        self,
        rows: Sequence[dict[str, Any]],
        steps: int,
        *,
        description: dict[str, Any] | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> AsyncIterator[Step]:
        """Train `steps` batches on `rows` (plain dicts), yielding each when its weights are published.

        description: what config.json holds (default: this trainer's options). resume: the directory of an earlier run
        with the same options and rows, which goes on where it ended, whatever ended it; `steps` counts its batches,
        too, and run_dir is the same directory or left out. Raises ConfigError before any process starts, and RunError,
        WorkerDied or TrajectoryError when the run can't go on. One that can't go on while the caller holds a step says
        so in a RunWarning, ends, and raises the error when the next one is asked for.
        """
        rows = self._training_rows(rows)
        spec, rules = self._check(rows, steps)
        model_files = _model_files(spec, self.engine.model.source)
        require_room(resume or self.run_dir or "runs", spec.model, self.config.checkpointing)
        recipe = self._description(description, rows, model_files)
        plan = RunPlan(self.engine, self.config, spec, rules, rows, recipe, self._evaluator, self._validate_batch)
        directory = self.run_directory = self._directory(recipe, resume)
        with RunLock(directory) as lock:
            resumption = read_resumption(directory) if resume is not None else None
            self.was_complete = resumption is not None and resumption.is_complete(steps, self._evaluator)
            if self.was_complete:
                return
            if resumption is not None:
                record_changes(directory, recipe)
            with _frozen(), open_files(plan, directory, lock, resumption, model_files) as files:
                self._checkpoints = files.checkpoints
                self._run = TrainingRun(plan, files, resumption)
                # aclosing: a caller who leaves the loop early must end the run now, not when garbage is collected.
                watch = self._stall_watch(directory)
                with watch.watching():
                    async with aclosing(InnerGenerator(self._run.steps())) as trained:
                        async for step in trained:
                            self._with_caller = True
                            with watch.with_caller(step.n):
                                yield step
                            self._with_caller = False

    def check(self, rows: Sequence[dict[str, Any]], steps: int) -> None:
        """Raise ConfigError for what `run` would refuse; starts nothing and writes nothing."""
        self._check(self._training_rows(rows), steps)

    def request_stop(self) -> None:
        """End the run after the update that has begun; from a signal handler or another task of the run's loop."""
        if self._run is not None:
            self._run.request_stop()

    @property
    def waits_for(self) -> str:
        """Whom the trainer waits for now, in words; empty when it is itself at work, or in no run."""
        return self._run.waits_for if self._run is not None else ""

    @property
    def stopped(self) -> bool:
        """Whether the last run ended before its steps were done, as someone asked for."""
        return self._run is not None and self._run.stopped

    @property
    def left_unsaved(self) -> bool:
        """Whether the last run was to stop while its learner was gone, and did not wait for another one: what came
        after its checkpoint is in the journal alone, and is trained again at a resume.
        """
        return self._run is not None and self._run.left_unsaved

    @property
    def checkpoint(self) -> Path | None:
        """The last run's newest checkpoint, a model directory; None if it has saved none."""
        return self._checkpoints.latest if self._checkpoints is not None else None

    @property
    def save_seconds(self) -> float:
        """What the longest save of a checkpoint has taken in the last run; 0 if it has saved none."""
        return self._checkpoints.longest_save if self._checkpoints is not None else 0.0

    @property
    def evaluations(self) -> list[Evaluation]:
        """Of the last run, in order."""
        return self._run.evaluations if self._run is not None else []

    def _stall_watch(self, directory: Path) -> StallWatch:
        run, model, self._with_caller = self._run, self.engine.model, False

        def moves() -> Any:
            active = model.active
            idle = self._with_caller or active is None or active.failure is not None  # one that ends has bounds enough
            return None if idle else moves_of(active)

        async def report() -> dict[str, Any]:
            return {"trainer": run.state()} | (await run_report(model.active) if model.active is not None else {})

        def fail(error: BaseException) -> None:
            if model.active is not None:
                model.active.fail(error)

        return StallWatch(
            directory,
            self.config.stall_timeout,
            moves=moves,
            report=report,
            waits_for=lambda: run.waits_for,
            fail=fail,
            stops=self.config.on_stall == "stop",
        )

    def _directory(self, description: dict[str, Any], resume: str | os.PathLike[str] | None) -> Path:
        """Made now, unless it is that of an earlier run."""
        if resume is not None:
            refuse_other_place(resume, self.run_dir)
            return find_run(resume, description)
        if self.run_dir is None:
            return make_default_run_dir(self.config.mode, time.localtime(), description)
        return make_run_dir(self.run_dir, description)

    def _training_rows(self, rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The checked rows, without those that are held out."""
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise ConfigTypeError(f"rows is {type(rows).__name__}; give a list of dicts.")
        check_rows(rows)
        self.engine.env.check_rows(rows)
        if self._evaluator is None:
            return rows
        self.engine.env.check_rows(self._evaluator.holdout, "Holdout row")
        left = without_holdout(rows, self._evaluator.holdout)
        removed = len(rows) - len(left)
        if removed and not left:
            raise ConfigError(f"All {removed} training rows are in Evaluator.holdout too; give rows that are not.")
        if removed:
            warn(f"{removed} of {len(rows)} training rows are in Evaluator.holdout too, and are left out of training.")
        return left

    def _description(
        self, given: dict[str, Any] | None, rows: Sequence[dict[str, Any]], model_files: Mapping[str, bytes]
    ) -> dict[str, Any]:
        """What config.json holds: `given`, or else this trainer's options, and with it what the model and the rows
        are.
        """
        model = self.engine.model
        digests = {"files_digest": files_digest(model_files), "weights_digest": weights_digest(model.source.weights)}
        return (given or self._options()) | {
            "model": model.source.describe() | {"compute_dtype": model.dtype} | digests,
            "rows": {"number": len(rows), "digest": rows_digest(rows)},
        }

    def _options(self) -> dict[str, Any]:
        options = config_json(self.config, seed=self.config.engine.seed)
        if self._evaluator is not None:
            options["evaluator"] = self._evaluator.describe()
        return options

    def _check(self, rows: Sequence[dict[str, Any]], steps: int) -> tuple[RunSpec, ScheduleRules]:
        self.config.check_run(dataset_rows=len(rows), steps=steps)
        rules = make_rules(self.config, rows=rows, steps=steps)
        model = self.engine.model
        spec = make_spec(model, self.config, evaluates=self._evaluator is not None)
        model.check_limits(spec, self.engine.env)
        return spec, rules


@contextmanager
def _frozen() -> Iterator[None]:
    """What exists now (modules, rows) outlives the run: walking it in every collection cost a tenth of this process.
    What an earlier run has left goes first, descriptors among it: frozen, it would stay for good.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _model_files(spec: RunSpec, source: ModelSource) -> dict[str, bytes]:
    """What the run's checkpoints hold beside the weights. Raises before anything starts, not when they are saved."""
    if source.directory is None:
        return own_model_files(spec.model, spec.sampling["stop_ids"])
    return read_model_files(source.directory)


def run(
    trainer: AsyncTrainer,
    rows: Sequence[dict[str, Any]],
    steps: int,
    on_step: Callable[[Step], None] | None = None,
    *,
    resume: str | os.PathLike[str] | None = None,
) -> list[Step]:
    """`trainer.run` outside asyncio: trains, calls `on_step` with each step, and returns them all. on_step: a plain
    function, during which nothing else of the run gets on; a coroutine would never run (ConfigTypeError).
    """
    if on_step is not None and not is_plain_function(on_step):
        raise ConfigTypeError(f"on_step is {on_step!r:.100}; give a plain function, or leave it out.")

    async def collect() -> list[Step]:
        done = []
        # aclosing: what on_step raises must end the run in order, before asyncio.run cancels what it finds.
        async with aclosing(trainer.run(rows, steps, resume=resume)) as trained:
            async for step in trained:
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
