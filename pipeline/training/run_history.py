"""What a learner that starts in the middle of a run begins with: a checkpoint, and the journal's updates since."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pipeline.checkpoints.marker import Incomplete
from pipeline.checkpoints.saved import SavedCheckpoint, find_checkpoints, set_aside
from pipeline.errors import JournalError
from pipeline.journal.journal_files import path_of, read
from pipeline.journal.records import BatchRecord, rows_of
from pipeline.journal.run_state import RunState, TrainingNow
from pipeline.processes.learner.learner_history import PastUpdate
from pipeline.run_dir.run_files import FIRST_JOURNAL_FILE, JOURNAL
from pipeline.user_warnings import warn_of_run
from workers.errors import CheckpointError


class RunHistory:
    """Of the run in `run_dir` (`LearnerHistory`). on_damage(checkpoints, instead) is told which are damaged, and which
    one the run goes on from, if from any; from the thread of `base`.
    """

    def __init__(
        self,
        run_dir: Path,
        on_damage: Callable[[Collection[Path], Path | None], None] = lambda checkpoints, instead: None,
    ) -> None:
        self._run_dir = run_dir
        self._on_damage = on_damage

    def base(self, oldest: int, is_cancelled: Callable[[], bool] = lambda: False) -> tuple[int, Path | None]:
        """The newest checkpoint at version `oldest` or before that holds what was saved; (0, None): the model's own
        first weights. Blocks while it reads them.

        A damaged one is set aside, with a warning, if the journal goes back to an older one; without that
        CheckpointError names the damaged file, and it stays where it is.
        """
        damaged: dict[Path, Incomplete] = {}
        for saved in find_checkpoints(self._run_dir)[0]:
            # One may stay for its weights alone, without the journal that would lead on from it.
            if saved.version > oldest or (damaged and not self._has_journal(saved.journal)):
                continue
            try:
                saved.check_contents(is_cancelled)
            except Incomplete as error:
                damaged[saved.path] = error
            else:
                self._on_damage(damaged, saved.path)
                self._pass_over(damaged, f"version {saved.version}")
                return saved.version, saved.path
        self._on_damage(damaged, None)
        if damaged and not self._has_journal(FIRST_JOURNAL_FILE):
            path, error = next(iter(damaged.items()))
            raise CheckpointError(
                f"The checkpoint {path} is damaged: {error}; and there is no older one from which the journal leads "
                "on. Put a good copy of that file back and resume, or begin another run."
            )
        self._pass_over(damaged, "the model that the run began with")
        return 0, None

    def _has_journal(self, ordinal: int) -> bool:
        return path_of(self._run_dir / JOURNAL, ordinal).exists()

    def _pass_over(self, damaged: dict[Path, Incomplete], instead: str) -> None:
        for path, error in damaged.items():
            told = f"The checkpoint {path} is damaged: {error}. The learner goes on from {instead} and the journal"
            try:
                aside = set_aside(path)
            except OSError as failed:
                warn_of_run(f"{told}; it can't be set aside ({failed.strerror}): remove it.")
            else:
                warn_of_run(f"{told}; what is left of it is {aside.name} now, and is nobody's: remove it.")

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
