"""One run of an AsyncTrainer between its `run` and its `end` event: processes opened, batches trained with evaluations
between them, and all of it closed however it ends.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from pipeline.checkpoints.checkpoints import Checkpoints
from pipeline.data.mixed_rows import MixedRows
from pipeline.evaluation.evaluations import Evaluations
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.journal.journal_files import Journal
from pipeline.journal.log_bookmark import LogBookmark
from pipeline.journal.log_state import LogState
from pipeline.journal.recorder import Recorder
from pipeline.journal.run_state import RunState
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.learner.learner_history import StartingPoint
from pipeline.processes.opening import Stopped, unless_stopped
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.rollouts import RolloutRules, Rollouts
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.json_lines import JsonLines
from pipeline.run_dir.run_lock import RunLock
from pipeline.run_spec import RunSpec
from pipeline.schedule import ScheduleRules
from pipeline.trainer_config import TrainerConfig
from pipeline.training.resumption import Resumption, make_scheduler
from pipeline.training.rollout_saver import RolloutSaver
from pipeline.training.run_evaluations import RunEvaluations
from pipeline.training.run_history import RunHistory
from pipeline.training.run_log import RunLog
from pipeline.training.run_saver import RunSaver
from pipeline.training.training_loop import Step, TrainingLoop, ValidateBatch
from pipeline.training.trajectory_log import TrajectoryLog
from pipeline.user_warnings import warn_of_run
from shm.errors import HeadwayError


class SaveAtEnd(Enum):
    """What becomes of the weights when a run ends."""

    OR_FAIL = 1  # it went as someone wanted: not to save is an error
    IF_POSSIBLE = 2  # it is ending with an error, which no other one may hide
    NOTHING = 3


class TrainingRun:
    """Made by `AsyncTrainer.run`, which has checked everything and owns the log files; `steps` is called once.

    journal: begun by nobody yet. resumption: where an earlier run in the same directory stood; None: this is the first.
    lock: told where the run's ledger is. results: eval.jsonl, with an evaluator. trajectories: trajectories.jsonl, if
    it is to have lines. log_dir: where the processes' own logs go.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        config: TrainerConfig,
        spec: RunSpec,
        rules: ScheduleRules,
        rows: Sequence[dict[str, Any]],
        *,
        events: EventLog,
        metrics: JsonLines,
        results: JsonLines | None,
        trajectories: JsonLines | None,
        checkpoints: Checkpoints,
        journal: Journal,
        lock: RunLock,
        resumption: Resumption | None,
        run_dir: Path,
        recipe: Mapping[str, Any],
        log_dir: str,
        evaluator: Evaluator | None,
        validate_batch: ValidateBatch | None,
    ) -> None:
        self.stopped = False  # ended before its steps were done, as someone asked for
        self.left_unsaved = False  # ended without a learner, which could not be waited for: a resume trains again
        # In order, those of an earlier run included.
        self.evaluations: list[Evaluation] = [] if resumption is None else list(resumption.evaluations)
        self._engine = engine
        self._model = engine.model
        self._config = config
        self._spec = spec
        self._resumption = resumption
        state = RunState() if resumption is None else resumption.state
        self._scheduler = make_scheduler(rules, state)
        self._recorder = Recorder(journal, events, state)
        self._bookmark = LogBookmark(run_dir, events, LogState() if resumption is None else resumption.log)
        self._run_dir = run_dir
        self._recipe = recipe
        self._history = RunHistory(run_dir)
        self._rows = rows
        self._events = events
        self._log = RunLog(config, rules, events, metrics, resumption)
        self._results = results
        self._trajectory_log = TrajectoryLog(trajectories, rows, config) if trajectories is not None else None
        self._checkpoints = checkpoints
        self._journal = journal
        self._lock = lock
        self._log_dir = log_dir
        self._evaluator = evaluator
        self._validate_batch = validate_batch
        self._stop_asked = asyncio.Event()
        self._opening = False  # the processes are being started
        self._saving = False
        self._active: ActiveRun | None = None
        self._loop: TrainingLoop | None = None
        self._saver: RunSaver | None = None
        self._kept: RolloutSaver | None = None
        self._evaluations: RunEvaluations | None = None
        self._held: int | None = None  # the step that the caller has, and has not asked for the next one
        self._broken_by: BaseException | None = None  # why training can't go on
        self._ending: asyncio.Task[None] | None = None  # of a run that broke while its caller held a step

    def request_stop(self) -> None:
        """End after the update that has begun."""
        self._stop_asked.set()
        if self._loop is not None:
            self._loop.request_stop()
        if self._active is not None:
            self._active.end_soon(Stopped())

    @property
    def waits_for(self) -> str:
        """Whom the trainer waits for now, in words; empty when it is itself at work."""
        if self._opening:
            return f"the processes to start{self._model.starting}"
        if self._ending is not None and self._ending.done():
            return "its caller, who holds a step; the run has failed, and tells why when the next one is asked for"
        if self._saving or (self._saver is not None and self._saver.saves is not None):
            return f"the learner, which saves version {self._scheduler.version}"
        return self._loop.waits_for if self._loop is not None else ""

    def state(self) -> dict[str, Any]:
        """For a report; empty before the first batch and after the last."""
        return self._loop.state() if self._loop is not None else {}

    async def steps(self) -> AsyncIterator[Step]:
        """Train, yielding each batch when its weights are published. Raises what ended the run, but for a stop."""
        status, save, cause = "failed", SaveAtEnd.IF_POSSIBLE, None
        scheduler = self._scheduler
        self._log.start()
        try:
            run = self._active = await self._open()
            self._lock.tell(**run.live)
            counters = SamplingCounters()
            rollouts = self._make_rollouts(run, counters)
            kept = self._kept = RolloutSaver(self._run_dir, rollouts, self._config.checkpointing.rollout_every)
            saver = self._saver = RunSaver(
                self._checkpoints, self._journal, self._recorder, run, kept, self._bookmark, self._recipe
            )
            kept.start(run.fail)
            self._loop = TrainingLoop(
                self._config,
                run,
                scheduler,
                rollouts,
                counters,
                self._validate_batch,
                recorder=self._recorder,
                trajectory_log=self._trajectory_log,
                mix=self._rows if isinstance(self._rows, MixedRows) else None,
            )
            evaluations = self._evaluations = self._make_evaluations(run, rollouts, saver)
            is_saved = self._resumption is not None and self._resumption.saved_version is not None
            if not is_saved and self._recorder.state.training is None:
                await saver.save(may_fail=True)
            if self._resumption is not None:
                counters.begun_anew += self._log.started_again()
                begun = self._recorder.state.training  # before the rest of a group of it may come
                self._loop.intake.resume(self._resumption.kept)
                evaluations.launch_again(self._unfinished_evaluation())
                self._resumption.kept.clear()  # their tokens are the rollouts' by now: many, where rollouts are long
                if begun is not None:
                    await evaluations.launch()
                    step = await self._loop.take_again(begun, self._resumption.log.due)
                    self._log.step(step)
                    with self._with_caller(step):
                        yield step
            while scheduler.batches < scheduler.rules.steps:
                await evaluations.launch()
                step = await self._loop.step()
                step.metrics.update(evaluations.take_metrics())
                self._log.step(step)
                if self._checkpoints.due(scheduler.version):
                    await saver.save(may_fail=True)
                with self._with_caller(step):
                    yield step
            await evaluations.finish()
            status, save = "completed", SaveAtEnd.OR_FAIL
        except Stopped:
            status, save, self.stopped = "stopped", SaveAtEnd.OR_FAIL, True
        except GeneratorExit:  # the caller left its loop
            status, save, self.stopped = "stopped", SaveAtEnd.OR_FAIL, self._ending is None
            raise
        except asyncio.CancelledError:
            status, self.stopped = "stopped", True
            if self._stop_asked.is_set():  # this is the second request: end now
                save = SaveAtEnd.NOTHING
            raise
        except Exception as error:
            cause = error
            raise
        finally:
            # Neither is shielded: a second request to stop that comes now cuts it short.
            await (self._end(status, save, cause) if self._ending is None else self._ending)

    async def _end(self, status: str, save: SaveAtEnd, cause: BaseException | None) -> None:
        """Close all of it. status: for the `end` event, unless the end fails, too; cause: of a failure."""
        run, loop, self._loop, self._opening = self._active, self._loop, None, False
        # Nested, for a cancellation may come in here too: asyncio.run cancels what its coroutine has left behind.
        # After it a second GeneratorExit is thrown in, which would close a coroutine that did all this for us.
        try:
            try:
                try:
                    if self._evaluations is not None:
                        await self._evaluations.stop()
                finally:
                    if self._kept is not None:
                        await self._kept.stop_rollouts(is_last=save is not SaveAtEnd.NOTHING)
                if run is not None and loop is not None and save is not SaveAtEnd.NOTHING:
                    await self._save(run, loop, self._saver, save)
            except asyncio.CancelledError:
                status, cause, self.stopped = "stopped", None, True
                if self._stop_asked.is_set():  # the second request may come as late as here
                    save = SaveAtEnd.NOTHING
                raise
            except Exception as error:
                status, cause = "failed", error
                raise
            finally:
                if run is not None:
                    await self._model.end_run(run, at_once=save is SaveAtEnd.NOTHING)
                    self._active = None  # its processes may serve another run from now on
        finally:
            self._log.end(status, self._recorder.state, cause)

    # --- while the caller has a step -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _with_caller(self, step: Step) -> Iterator[None]:
        """For as long as the caller likes: who asks for nothing is told of nothing, so a run that breaks meanwhile says
        so and ends by itself. Raises what broke it, then, when the next step is asked for.
        """
        self._held = step.n
        self._look_soon()  # it may be broken already
        try:
            yield
        finally:
            self._held = None
        if self._ending is not None:
            raise self._broken_by

    def _broke(self, error: BaseException) -> None:
        """Training can't go on. What is asked for (Stopped) is no failure, nor what comes of it."""
        if not self._stop_asked.is_set():
            self._broken_by = self._broken_by or error
            self._look_soon()

    def _look_soon(self) -> None:
        """Not now: who asks for the next step at once needs no other word than the error."""
        asyncio.get_running_loop().call_soon(self._end_if_held)

    def _end_if_held(self) -> None:
        if self._broken_by is not None and self._held is not None and self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._fail_held(self._held, self._broken_by))

    async def _fail_held(self, step: int, error: BaseException) -> None:
        try:
            warn_of_run(f"The run has failed while its caller holds step {step}, and ends: {error}")
        finally:
            await self._end("failed", SaveAtEnd.IF_POSSIBLE, error)

    async def _save(self, run: ActiveRun, loop: TrainingLoop, saver: RunSaver, save: SaveAtEnd) -> None:
        """The last checkpoint: of the version after an update that has begun."""
        if not run.learner_serves and (save is SaveAtEnd.IF_POSSIBLE or self._stop_asked.is_set()):
            self.left_unsaved = save is SaveAtEnd.OR_FAIL
            return
        self._saving = True
        try:
            settled = await loop.settle()
            if settled is not None:
                self._log.step(settled)
            await saver.save()
        except Stopped:  # the learner died meanwhile: the journal has what it was to save
            self.left_unsaved = True
        except HeadwayError as error:
            if save is SaveAtEnd.OR_FAIL:
                raise
            warn_of_run(f"The weights of the run that ended early could not be saved: {error}")
        finally:
            self._saving = False

    # --- what it is made of --------------------------------------------------------------------------------------

    async def _open(self) -> ActiveRun:
        self._opening = True
        opening = self._model.open_run(
            self._spec,
            self._engine.env,
            events=self._events,
            log_dir=self._log_dir,
            max_requests=self._config.engine.schedule.sample_requests,
            start=StartingPoint(
                history=self._history, version=self._scheduler.version, republish=self._versions_needed()
            ),
        )
        run = await unless_stopped(opening, self._stop_asked, self._model.end_run)
        self._opening = False
        return run

    def _unfinished_evaluation(self) -> tuple[int, int] | None:
        """(batches, version) of the one that the earlier run had launched and not finished."""
        if self._resumption is None or self._evaluator is None:
            return None
        return self._resumption.unfinished_evaluation(self._evaluator, self._spec.num_slots)

    def _versions_needed(self) -> list[int]:
        """Those before the present one that somebody will sample under."""
        if self._resumption is None:
            return []
        needed, unfinished = self._resumption.pinned_versions, self._unfinished_evaluation()
        if unfinished is not None:
            needed.add(unfinished[1])
        return sorted(needed - {self._scheduler.version})

    def _make_rollouts(self, run: ActiveRun, counters: SamplingCounters) -> Rollouts:
        config = self._config
        rollouts = Rollouts(
            config.engine,
            run,
            self._model.chat,
            self._rows,
            config.group_size,
            RolloutLog(self._events, counters),
            RolloutRules(
                concurrency=config.engine.schedule.concurrency,
                completion=config.completion,
                oldest_first=config.oldest_first,
                replace_failed=config.on_failure == "replace",
                keeps_conversation=self._trajectory_log.wants if self._trajectory_log is not None else None,
            ),
        )
        rollouts.on_interrupt = self._broke
        return rollouts

    def _make_evaluations(self, run: ActiveRun, rollouts: Rollouts, saver: RunSaver) -> RunEvaluations:
        evaluations = None
        if self._evaluator is not None:
            evaluations = Evaluations(
                self._evaluator,
                self._config.engine,
                run,
                self._model.chat,
                lines=self._results,
                done=self.evaluations,
                waits=self._loop.waits,
                stop_asked=self._stop_asked,
                on_failure=rollouts.interrupt,
                oldest_first=self._config.oldest_first,
                measured=self._resumption.measured if self._resumption is not None else (),
            )
        return RunEvaluations(
            evaluations,
            self.evaluations,
            self._scheduler,
            self._checkpoints,
            saver,
            self._loop.time_account,
            keep_best=self._config.checkpointing.keep_best > 0,
        )
