"""What a run as a whole leaves in its logs: its `run` and `end` events, what starts again, a line for each step."""

from pipeline.journal.run_state import RunState
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.json_lines import JsonLines
from pipeline.schedule import ScheduleRules
from pipeline.trainer_config import TrainerConfig
from pipeline.training.resumption import Resumption
from pipeline.training.training_loop import Step


class RunLog:
    """Of one run. resumption: where an earlier run in the same directory stood; None: this is the first."""

    def __init__(
        self,
        config: TrainerConfig,
        rules: ScheduleRules,
        events: EventLog,
        metrics: JsonLines,
        resumption: Resumption | None,
    ) -> None:
        self._config = config
        self._rules = rules
        self._events = events
        self._metrics = metrics
        self._resumption = resumption

    def start(self) -> None:
        """What a reader must know to check all that follows."""
        config, rules = self._config, self._rules
        self._events.log(
            "run",
            mode=config.mode,
            max_staleness=rules.max_staleness,
            stale_policy=rules.stale_policy,
            on_stragglers=config.completion.on_stragglers,
            groups_per_step=rules.groups_per_step,
            group_size=rules.group_size,
            admit_ahead=rules.admit_ahead,
            oversample_factor=rules.oversample_factor,
            concurrency=config.engine.schedule.concurrency,
            steps=rules.steps,
            # With a step that is taken again, the log may be ahead: its version was published.
            version=0 if self._resumption is None else self._resumption.log.version,
            **({} if self._resumption is None else {"resumed": self._resumption.log.num_runs}),
        )
        self._events.sync()

    def started_again(self) -> int:
        """Tell of the trajectories that the earlier run had begun, and that begin anew; returns how many."""
        events = [] if self._resumption is None else list(self._resumption.started_again())
        for event in events:
            self._events.log("retry", **event)
        return len(events)

    def step(self, step: Step) -> None:
        """A line of metrics.jsonl, on the disk at once: the journal's next record takes this batch for done, and a full
        disk is known before the `end` event tells how the run ended.
        """
        self._events.flush()
        line = {"step": step.n, "model_step": step.model_step, "time": self._events.seconds()} | step.metrics
        self._metrics.write(line)
        self._metrics.sync()

    def end(self, status: str, state: RunState, cause: BaseException | None = None) -> None:
        """state: what became of the run's groups. cause: what a run that "failed" has failed with."""
        given_up, consumed = state.given_up, state.consumed
        self._events.log(
            "end",
            status=status,
            steps=state.batches + (state.training is not None),
            admitted=state.admitted,
            consumed=consumed,
            filtered=given_up["filtered"],
            failed=given_up["failed"],
            outstanding=state.admitted - consumed - given_up.total(),
            **({} if cause is None else {"cause": str(cause)}),
        )
        self._events.flush()  # whoever holds a step may do so for hours
