"""One run of an AsyncTrainer between its `run` and its `end` event: processes opened, batches trained with evaluations
between them, and all of it closed however it ends.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

from pipeline.data.mixed_rows import MixedRows
from pipeline.evaluation.evaluations import Evaluations, Results
from pipeline.evaluation.evaluator import Evaluation
from pipeline.journal.log_bookmark import LogBookmark
from pipeline.journal.log_state import LogState
from pipeline.journal.recorder import Recorder
from pipeline.journal.run_state import RunState
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.learner.learner_history import StartingPoint
from pipeline.processes.opening import Stopped, unless_stopped
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.rollouts import RolloutRules, Rollouts
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.training.ending import Ending, SaveAtEnd
from pipeline.training.open_files import OpenFiles
from pipeline.training.resumption import Resumption, make_scheduler
from pipeline.training.rollout_saver import RolloutSaver
from pipeline.training.run_evaluations import RunEvaluations
from pipeline.training.run_history import RunHistory
from pipeline.training.run_log import RunLog
from pipeline.training.run_plan import RunPlan
from pipeline.training.run_saver import RunSaver
from pipeline.training.training_loop import Step, TrainingLoop
from pipeline.training.trajectory_log import TrajectoryLog
from pipeline.user_warnings import warn_of_run
from shm.errors import HeadwayError


class TrainingRun:
    """Made by `AsyncTrainer.run`, which has checked everything and owns the files; `steps` is called once.

    resumption: where an earlier run in the same directory stood; None: this is the first.
    """

    def __init__(self, plan: RunPlan, files: OpenFiles, resumption: Resumption | None) -> None:
        self.stopped = False  # ended before its steps were done, as someone asked for
        self.left_unsaved = False  # ended without a learner, which could not be waited for: a resume trains again
        # In order, those of an earlier run included.
        self.evaluations: list[Evaluation] = [] if resumption is None else list(resumption.evaluations)
        self._plan = plan
        self._files = files
        self._model = plan.engine.model
        self._config = plan.config
        self._resumption = resumption
        state = RunState() if resumption is None else resumption.state
        self._scheduler = make_scheduler(plan.rules, state)
        self._recorder = Recorder(files.journal, files.events, state)
        self._bookmark = LogBookmark(
            files.directory, files.events, LogState() if resumption is None else resumption.log
        )
        self._log = RunLog(plan.config, plan.rules, files.events, files.metrics, resumption)
        self._trajectory_log = None
        if files.trajectories is not None:
            self._trajectory_log = TrajectoryLog(files.trajectories, plan.rows, plan.config)
        self._stop_asked = asyncio.Event()
        self._opening = False  # the processes are being started
        self._saving = False
        # Set by `_set_up` one by one: what there is when it fails has to be wound up.
        self._active: ActiveRun | None = None
        self._counters: SamplingCounters | None = None
        self._kept: RolloutSaver | None = None
        self._saver: RunSaver | None = None
        self._loop: TrainingLoop | None = None
        self._evaluations: RunEvaluations | None = None
        self._held: int | None = None  # the step that the caller has, and has not asked for the next one
        self._broken_by: BaseException | None = None  # why training can't go on
        self._own_end: asyncio.Task[None] | None = None  # of a run that broke while its caller held a step

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
        if self._own_end is not None and self._own_end.done():
            return "its caller, who holds a step; the run has failed, and tells why when the next one is asked for"
        if self._saving or (self._saver is not None and self._saver.saves is not None):
            standing = self._active.standing_still if self._active is not None else ""
            return f"the learner, which saves version {self._scheduler.version}" + (f"; {standing}" if standing else "")
        return self._loop.waits_for if self._loop is not None else ""

    def state(self) -> dict[str, Any]:
        """For a report; empty before the first batch and after the last."""
        return self._loop.state() if self._loop is not None else {}

    async def steps(self) -> AsyncIterator[Step]:
        """Train, yielding each batch when its weights are published. Raises what ended the run, but for a stop."""
        ending, scheduler = Ending(), self._scheduler
        self._log.start()
        try:
            await self._set_up()
            step = await self._go_on()
            if step is not None:
                with self._with_caller(step):
                    yield step
            while scheduler.batches < scheduler.rules.steps:
                step = await self._step()
                with self._with_caller(step):
                    yield step
            await self._evaluations.finish()
            ending.status, ending.save = "completed", SaveAtEnd.OR_FAIL
        except Stopped:
            ending.status, ending.save, self.stopped = "stopped", SaveAtEnd.OR_FAIL, True
        except GeneratorExit:  # the caller left its loop
            ending.status, ending.save, self.stopped = "stopped", SaveAtEnd.OR_FAIL, self._own_end is None
            if self._active is not None:  # it has not ended by itself
                self._active.end_soon(Stopped())
            raise
        except asyncio.CancelledError:
            if self._own_end is None:
                self._end_at_once(ending)
            raise
        except Exception as error:
            ending.cause = error
            raise
        finally:
            # Nothing is shielded: a second request to stop that comes now cuts it short.
            if self._own_end is not None:
                await self._own_end
            else:
                # Part by part, in here: asyncio.run cancels what its coroutine has left behind, and after that
                # cancellation a second GeneratorExit is thrown in, which closes whatever coroutine is awaited here. One
                # that did all this for us would leave half of it undone.
                for part in self._wind_up(ending):
                    with ending.noting():
                        await part

    async def _set_up(self) -> None:
        """All that takes part in the run, and the checkpoint that it begins with."""
        plan, files = self._plan, self._files
        run = self._active = await self._open()
        files.lock.tell(**run.live)
        counters = self._counters = SamplingCounters()  # only now: their first interval begins
        rollouts = self._make_rollouts(run, counters)
        kept = self._kept = RolloutSaver(
            files.directory, rollouts, files.events, plan.config.checkpointing.rollout_every
        )
        saver = self._saver = RunSaver(
            files.checkpoints, files.journal, self._recorder, run, kept, self._bookmark, plan.recipe
        )
        kept.start(run.fail)
        loop = self._loop = TrainingLoop(
            plan.config,
            run,
            self._scheduler,
            rollouts,
            counters,
            plan.validate_batch,
            recorder=self._recorder,
            trajectory_log=self._trajectory_log,
            mix=plan.rows if isinstance(plan.rows, MixedRows) else None,
        )
        self._evaluations = self._make_evaluations(run, rollouts, saver, loop)
        is_saved = self._resumption is not None and self._resumption.saved_version is not None
        if not is_saved and self._recorder.state.training is None:
            await saver.save(may_fail=True)

    async def _go_on(self) -> Step | None:
        """Where an earlier run stood, if there was one: the step of the batch that it had begun, if it had."""
        if self._resumption is None:
            return None
        self._counters.begun_anew += self._log.started_again()
        begun = self._recorder.state.training  # before the rest of a group of it may come
        self._loop.intake.resume(self._resumption.kept)
        self._evaluations.launch_again(self._unfinished_evaluation())
        self._resumption.kept.clear()  # their tokens are the rollouts' by now: many, where rollouts are long
        if begun is None:
            return None
        await self._evaluations.launch()
        step = await self._loop.take_again(begun, self._resumption.log.due)
        self._log.step(step)
        return step

    async def _step(self) -> Step:
        """Train one batch. The process may be killed between any two lines."""
        await self._evaluations.launch()
        step = await self._loop.step()
        step.metrics.update(self._evaluations.take_metrics())
        # Until it has its line, a resume takes the batch again: so its line comes before the caller is told of it, who
        # would be told twice. A checkpoint counts it as trained, and no resume could make up for its line any more.
        self._log.step(step)
        # The caller may stay away for long, and may look for the checkpoint that this step made due.
        if self._files.checkpoints.due(self._scheduler.version):
            await self._saver.save(may_fail=True)
        return step

    # --- its end -------------------------------------------------------------------------------------------------

    def _wind_up(self, ending: Ending) -> Iterator[Awaitable[None]]:
        """What is left to do, in order. The caller awaits each part, `noting` what it raises; what the latest has
        raised is raised behind the last one, but for an error on top of what the run has failed with.
        """
        run, loop, self._loop, self._opening = self._active, self._loop, None, False
        if self._evaluations is not None:
            yield self._evaluations.stop()
        if self._kept is not None:
            yield self._kept.stop_rollouts(is_last=ending.save is not SaveAtEnd.NOTHING)
        if isinstance(ending.error, asyncio.CancelledError):
            self._end_at_once(ending)
        if loop is not None and ending.save is not SaveAtEnd.NOTHING and not isinstance(ending.error, Exception):
            yield self._save(run, loop, self._saver, ending.save)
            if isinstance(ending.error, asyncio.CancelledError):
                self._end_at_once(ending)
        if isinstance(ending.error, Exception) and ending.cause is None:
            ending.status, ending.cause = "failed", ending.error
        if run is not None:
            yield self._model.end_run(run, at_once=ending.save is SaveAtEnd.NOTHING)
            self._active = None  # its processes may serve another run from now on
        self._log.end(ending.status, self._recorder.state, ending.cause)
        if isinstance(ending.error, Exception) and ending.cause not in (None, ending.error):
            warn_of_run(f"The run that failed has not ended in order, either: {ending.error}")
        elif ending.error is not None:
            if isinstance(ending.error, asyncio.CancelledError) and ending.cause is not None and self._own_end is None:
                warn_of_run(f"The run had failed when it was stopped: {ending.cause}")  # else nobody hears of it
            raise ending.error

    def _end_at_once(self, ending: Ending) -> None:
        """As a cancellation has it, which may come as late as in winding up. What has failed by then stays failed."""
        if ending.cause is None:
            ending.status, self.stopped = "stopped", True
        if self._stop_asked.is_set():  # this is the second request: end now
            ending.save = SaveAtEnd.NOTHING

    async def _save(self, run: ActiveRun, loop: TrainingLoop, saver: RunSaver, save: SaveAtEnd) -> None:
        """The last checkpoint: of the version after an update that has begun."""
        is_stop = self.stopped or self._stop_asked.is_set()
        if not run.learner_serves and (save is SaveAtEnd.IF_POSSIBLE or is_stop):
            self.left_unsaved = save is SaveAtEnd.OR_FAIL
            return
        self._saving = True
        try:
            settled = await loop.settle()
            if settled is not None:
                self._log.step(settled)  # before it is saved, as in `_step`
            await saver.save()
        except Stopped:  # the learner died meanwhile: the journal has what it was to save
            self.left_unsaved = True
        except HeadwayError as error:
            if save is SaveAtEnd.OR_FAIL:
                raise
            warn_of_run(f"The weights of the run that ended early could not be saved: {error}")
        finally:
            self._saving = False

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
        if self._own_end is not None:
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
        if self._broken_by is not None and self._held is not None and self._own_end is None:
            self._own_end = asyncio.get_running_loop().create_task(self._fail_held(self._held, self._broken_by))

    async def _fail_held(self, step: int, error: BaseException) -> None:
        try:
            warn_of_run(f"The run has failed while its caller holds step {step}, and ends: {error}")
        finally:
            ending = Ending(cause=error)
            for part in self._wind_up(ending):
                with ending.noting():
                    await part

    # --- what it is made of --------------------------------------------------------------------------------------

    async def _open(self) -> ActiveRun:
        self._opening = True
        opening = self._model.open_run(
            self._plan.spec,
            self._plan.engine.env,
            events=self._files.events,
            log_dir=self._files.log_dir,
            max_requests=self._config.engine.schedule.sample_requests,
            start=StartingPoint(
                history=RunHistory(self._files.directory, self._files.checkpoints.damaged),
                version=self._scheduler.version,
                republish=self._versions_needed(),
            ),
        )
        run = await unless_stopped(opening, self._stop_asked, self._model.end_run)
        self._opening = False
        return run

    def _unfinished_evaluation(self) -> tuple[int, int] | None:
        """(batches, version) of the one that the earlier run had launched and not finished."""
        if self._resumption is None or self._plan.evaluator is None:
            return None
        return self._resumption.unfinished_evaluation(self._plan.evaluator, self._plan.spec.num_slots)

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
            self._plan.rows,
            config.group_size,
            RolloutLog(self._files.events, counters),
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

    def _make_evaluations(
        self, run: ActiveRun, rollouts: Rollouts, saver: RunSaver, loop: TrainingLoop
    ) -> RunEvaluations:
        evaluations = None
        if self._plan.evaluator is not None:
            evaluations = Evaluations(
                self._plan.evaluator,
                self._config.engine,
                run,
                self._model.chat,
                results=Results(
                    lines=self._files.results,
                    done=self.evaluations,
                    measured=self._resumption.measured if self._resumption is not None else (),
                ),
                waits=loop.waits,
                stop_asked=self._stop_asked,
                on_failure=rollouts.interrupt,
                oldest_first=self._config.oldest_first,
            )
        return RunEvaluations(
            evaluations,
            self.evaluations,
            self._scheduler,
            self._files.checkpoints,
            saver,
            loop.time_account,
            keep_best=self._config.checkpointing.keep_best > 0,
        )
