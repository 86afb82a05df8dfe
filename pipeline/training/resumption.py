"""Where an earlier run in the same directory stood: its newest complete checkpoint, the journal since, and its logs."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.checkpoints.saved import complete_checkpoints, run_checkpoint
from pipeline.errors import ConfigError, JournalError
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.journal.journal_files import read
from pipeline.journal.run_state import RunState
from pipeline.resume_check import refuse_changed
from pipeline.schedule import Scheduler, ScheduleRules
from pipeline.training.run_history import start_of

LINES = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Resumption:
    """number: how often the run has been resumed, this time included. state: with `training`, if the last batch has
    begun and did not get as far as its line in metrics.jsonl. versions: after each batch, by metrics.jsonl.
    evaluations: that have ended. batch_is_logged: the `batch` event of `state.training` is there.
    saved_version: of the newest complete checkpoint. seconds: of the last event. status: of the last `end`; None if
    the log does not end with one.
    """

    number: int
    state: RunState
    versions: Mapping[int, int] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    batch_is_logged: bool = False
    saved_version: int | None = None
    seconds: float = 0.0
    status: str | None = None

    @property
    def measured(self) -> frozenset[int]:
        """Batches after which there was an evaluation that has ended."""
        return frozenset(evaluation.batch for evaluation in self.evaluations)

    def is_complete(self, steps: int, evaluator: Evaluator | None) -> bool:
        """Whether nothing is left to do of a run of `steps` batches."""
        state = self.state
        measured = (
            evaluator is None
            or state.batches > steps
            or state.batches in self.measured
            or not evaluator.trajectories_per_row(state.batches, at_end=True)
        )
        done = state.training is None and state.batches >= steps and self.status == "completed"
        return done and measured and self.saved_version == state.version

    def unfinished_evaluation(self, evaluator: Evaluator) -> tuple[int, int] | None:
        """(batches, version) of the one that was launched and has not ended: the latest that was due. It is none of
        ours if it is due now.
        """
        for batches in range(self.state.batches - 1, -1, -1):
            if evaluator.trajectories_per_row(batches, at_end=False):
                return None if batches in self.measured else (batches, self.versions.get(batches, 0))
        return None


def find_run(path: str | os.PathLike[str], description: Mapping[str, Any]) -> Path:
    """The directory of a run that can go on as one of `description`. Raises ConfigError."""
    run_checkpoint(path)
    config = Path(path, "config.json")
    try:
        stored = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config} can't be read ({error}); without it the run can't go on.") from error
    refuse_changed(stored, description)
    return Path(path)


def read_resumption(run_dir: Path) -> Resumption:
    """Raises JournalError and CheckpointError. The logs have no torn ends."""
    versions = {line["step"]: line["model_step"] for line in _lines(run_dir / LINES)}
    state = _read_state(run_dir)
    if state.training is not None and state.training.record.step in versions:
        state.finish_batch()
    events = _lines(run_dir / "events.jsonl")
    begun = state.training.record.step if state.training is not None else None
    return Resumption(
        number=sum(event["event"] == "run" for event in events),
        state=state,
        versions=versions,
        evaluations=tuple(
            Evaluation(**line | {"row_rewards": tuple(line["row_rewards"])}) for line in _lines(run_dir / "eval.jsonl")
        ),
        batch_is_logged=any(event["event"] == "batch" and event["step"] == begun for event in events),
        saved_version=complete_checkpoints(run_dir)[0].version,
        seconds=events[-1]["t"],
        status=events[-1].get("status") if events[-1]["event"] == "end" else None,
    )


def _read_state(run_dir: Path) -> RunState:
    """What the run had decided; the last batch may have begun only."""
    saved = complete_checkpoints(run_dir)
    state, ordinal = start_of(saved[0] if saved else None)
    for record in read(run_dir, ordinal):
        state.apply(record)
    return state


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log that may not be there."""
    try:
        with open(path, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise JournalError(f"{path} can't be read ({error}); without it the run can't go on.") from error


def make_scheduler(rules: ScheduleRules, state: RunState) -> Scheduler:
    """The schedule where the run stands. Every untrained result is yet to be received, those of a batch in training
    included.
    """
    untrained = [*state.ready, *(state.training.groups if state.training is not None else ())]
    # group -> (version at admission, members that came before and are trained, or never will come)
    unconsumed = {group: (one.version, set(one.handed_over)) for group, one in state.outstanding.items()}
    for result in untrained:
        unconsumed.setdefault(result.group, (result.version, set(range(rules.group_size))))
    for result in untrained:  # they come once more
        unconsumed[result.group][1].difference_update(result.members)
    return Scheduler.resumed(
        rules,
        version=state.version,
        batches=state.batches,
        admitted=state.admitted,
        replaced=state.given_up.total(),
        unconsumed=unconsumed,
    )
