"""An evaluation without training: the weights are loaded and published once, and held-out rows are rolled out on them.

By the same `Evaluations` as beside training, so that the same weights, rows and seed give the same result.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from pipeline.evaluation.evaluations import Evaluations, Results
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.memory.make_spec import make_evaluation_spec
from pipeline.processes.learner.learner_history import StartingPoint
from pipeline.processes.opening import Stopped, unless_stopped
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.json_lines import JsonLines
from pipeline.run_dir.run_files import EVALUATIONS, EVENTS, LOGS
from pipeline.stalls.waits import Waits


class EvaluationRun:
    """Made before any process starts (ConfigError for what can't be); `run` is called once.

    evaluator: its rows and its final_group_size. version: what the result calls the weights.
    """

    def __init__(self, engine: RolloutEngine, evaluator: Evaluator, *, version: int = 0) -> None:
        self.stopped = False
        self._engine = engine
        self._evaluator = evaluator
        self._version = version
        engine.env.check_rows(evaluator.holdout, "Holdout row")
        rows, group_size = len(evaluator.holdout), evaluator.final_group_size
        self._spec = make_evaluation_spec(engine.model, engine.config, rows=rows, group_size=group_size)
        self._stop_asked = asyncio.Event()
        self._evaluations: Evaluations | None = None

    def request_stop(self) -> None:
        """End soon, without a result."""
        self._stop_asked.set()

    @property
    def rows_done(self) -> int | None:
        """None until the processes have started."""
        return None if self._evaluations is None else self._evaluations.rows_done

    async def run(self, directory: Path) -> Evaluation | None:
        """The result, which is in `directory`'s eval.jsonl, too; None after a stop. Raises what it failed with."""
        events = EventLog(directory / EVENTS, time.monotonic)
        results = JsonLines(directory / EVALUATIONS)
        status, done, cause = "failed", [], {}
        self._log_start(events)
        try:
            await self._measure(events, results, str(directory / LOGS), done)
            status = "completed"
        except Stopped:
            status, self.stopped = "stopped", True
        except asyncio.CancelledError:
            status, self.stopped = "stopped", True
            raise
        except Exception as error:
            cause = {"cause": str(error)}
            raise
        finally:
            nothing: dict[str, Any] = dict.fromkeys(("admitted", "consumed", "filtered", "failed", "outstanding"), 0)
            events.log("end", status=status, steps=0, **nothing, **cause)
            events.close()
            results.close()
        return done[0] if done else None

    async def _measure(self, events: EventLog, results: JsonLines, log_dir: str, done: list[Evaluation]) -> None:
        model, config = self._engine.model, self._engine.config
        opening = model.open_run(
            self._spec,
            self._engine.env,
            events=events,
            log_dir=log_dir,
            max_requests=config.schedule.sample_requests,
            start=StartingPoint(),
        )
        run = await unless_stopped(opening, self._stop_asked, model.end_run)
        try:
            self._evaluations = Evaluations(
                self._evaluator,
                config,
                run,
                model.chat,
                results=Results(lines=results, done=done, first_version=self._version),
                waits=Waits(events, time.monotonic, lambda: run.standing_still),
                stop_asked=self._stop_asked,
                on_failure=lambda error: None,  # `finish` raises it, and nothing else is under way
            )
            await self._evaluations.launch(0, at_end=True)
            await self._evaluations.finish(0)
        finally:
            try:
                if self._evaluations is not None:
                    await self._evaluations.stop()
            finally:
                await model.end_run(run)

    def _log_start(self, events: EventLog) -> None:
        events.log(
            "run",
            mode="eval",
            max_staleness=0,
            stale_policy="wait",
            on_stragglers="truncate",
            groups_per_step=1,
            group_size=self._evaluator.final_group_size,
            admit_ahead=0,
            oversample_factor=1.0,
            concurrency=self._engine.config.schedule.concurrency,
            steps=0,
            version=self._version,
        )
