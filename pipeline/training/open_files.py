"""The files that a run has open, from when nothing is in its way until it has ended."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.checkpoints import Checkpoints
from pipeline.journal.journal_files import Journal
from pipeline.run_dir.events import EventLog
from pipeline.run_dir.json_lines import JsonLines
from pipeline.run_dir.run_files import EVALUATIONS, EVENTS, LOGS, METRICS, TRAJECTORIES
from pipeline.run_dir.run_lock import RunLock
from pipeline.training.resumption import Resumption
from pipeline.training.run_plan import RunPlan
from workers.model_config import checkpoint_bytes


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """lock: of the directory; told where the run's ledger is. results: eval.jsonl, with an evaluator. trajectories:
    trajectories.jsonl, if it is to have lines. journal: in a file of this run's own.
    """

    directory: Path
    lock: RunLock
    events: EventLog
    metrics: JsonLines
    results: JsonLines | None
    trajectories: JsonLines | None
    journal: Journal
    checkpoints: Checkpoints

    @property
    def log_dir(self) -> str:
        """Where the processes' own logs go."""
        return str(self.directory / LOGS)


@contextmanager
def open_files(
    plan: RunPlan,
    directory: Path,
    lock: RunLock,
    resumption: Resumption | None,
    model_files: Mapping[str, bytes],
) -> Iterator[OpenFiles]:
    """Those of a run in `directory`, closed at the end, but for the lock. resumption: where an earlier run there stood;
    its logs go on. model_files: what a checkpoint holds beside the weights.
    """
    config = plan.config
    with (
        closing(Journal(directory)) as journal,
        closing(_open_events(directory, resumption)) as events,
        closing(JsonLines(directory / METRICS)) as metrics,
        _open_lines(directory / EVALUATIONS, plan.evaluator is not None) as results,
        _open_lines(directory / TRAJECTORIES, config.log_trajectories > 0, for_people=True) as trajectories,
    ):
        size = checkpoint_bytes(plan.spec.model)
        checkpoints = Checkpoints(directory, model_files, events, config.checkpointing, learner_bytes=size)
        journal.begin()
        yield OpenFiles(directory, lock, events, metrics, results, trajectories, journal, checkpoints)


def _open_events(directory: Path, resumption: Resumption | None) -> EventLog:
    """Its clock goes on from the last event of an earlier run."""
    seconds = 0.0 if resumption is None else resumption.log.seconds
    return EventLog(directory / EVENTS, time.monotonic, seconds)


def _open_lines(path: Path, is_wanted: bool, *, for_people: bool = False) -> AbstractContextManager[JsonLines | None]:
    return closing(JsonLines(path, for_people=for_people)) if is_wanted else nullcontext()
