"""What a learner that starts in the middle of a run begins with: a checkpoint, and the journal's updates since."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.checkpoints.saved import SavedCheckpoint, find_checkpoints
from pipeline.errors import JournalError
from pipeline.journal.journal_files import read
from pipeline.journal.records import BatchRecord, rows_of
from pipeline.journal.run_state import RunState, TrainingNow
from pipeline.processes.learner.learner_history import PastUpdate
from pipeline.run_files import FIRST_JOURNAL_FILE


class RunHistory:
    """Of the run in `run_dir` (`LearnerHistory`)."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def base(self, oldest: int) -> tuple[int, Path | None]:
        """The newest complete checkpoint at version `oldest` or before; (0, None): the model's own first weights."""
        for saved in find_checkpoints(self._run_dir)[0]:
            if saved.version <= oldest:
                return saved.version, saved.path
        return 0, None

    def updates(self, after: int, to: int) -> Iterator[PastUpdate]:
        """The updates from version `after`, that of a `base`, up to version `to`."""
        version = after
        state, ordinal = start_of(next((s for s in find_checkpoints(self._run_dir)[0] if s.version == after), None))
        for record in read(self._run_dir, ordinal):
            if version == to:
                return
            state.apply(record)
            if isinstance(record, BatchRecord) and record.updated:
                yield _update(state.training)
                version += 1
        if version != to:
            raise JournalError(
                f"The journal of {self._run_dir} ends at version {version}, before version {to}: its disk has "
                "lost records."
            )


def start_of(saved: SavedCheckpoint | None) -> tuple[RunState, int]:
    """(the state in a checkpoint, the journal's file that goes on from it); None: those of a run's start."""
    if saved is None:
        return RunState(), FIRST_JOURNAL_FILE
    return RunState.from_plain(saved.state()["run"]), saved.journal


def _update(training: TrainingNow) -> PastUpdate:
    record = training.record
    return PastUpdate(
        batch=record.step,
        from_version=record.version,
        chunks=[rows_of(chunk, training.trajectories) for chunk in record.chunks],
        lr=record.lr,
        gradient_scale=record.gradient_scale,
    )
