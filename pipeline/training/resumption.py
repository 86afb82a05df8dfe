"""Where an earlier run in the same directory stood: its newest complete checkpoint, the journal since, and its logs."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.checkpoints.saved import (
    SavedCheckpoint,
    complete_checkpoints,
    find_checkpoints,
    goes_on_from_start,
    require_checkpoints,
)
from pipeline.errors import JournalError, RunError
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.journal.complete_log import complete_log
from pipeline.journal.journal_files import is_blank, path_of, read
from pipeline.journal.log_state import LoggedMember, LogState
from pipeline.journal.run_state import RunState
from pipeline.rollouts.kept_members import KeptMembers, read_kept
from pipeline.run_dir.json_lines import cut_torn_tail, read_lines
from pipeline.run_dir.resume_check import nothing_left, refuse_changed, warn_of_versions
from pipeline.run_dir.run_directory import read_config
from pipeline.run_dir.run_files import EVALUATIONS, FIRST_JOURNAL_FILE, JOURNAL, METRICS, TRAJECTORIES
from pipeline.schedule import Scheduler, ScheduleRules
from pipeline.training.run_history import start_of
from pipeline.trajectory import Trajectory
from pipeline.user_warnings import warn_of_run


@dataclass(frozen=True, slots=True)
class Resumption:
    """state: with `training`, if the last batch has begun and did not get as far as its line in metrics.jsonl. log:
    what events.jsonl says. versions: after each batch, by metrics.jsonl. evaluations: that have ended. saved_version:
    of the newest complete checkpoint. first_version: the oldest that replay can reach. kept: what of each outstanding
    group need not be done again.
    """

    state: RunState
    log: LogState
    versions: Mapping[int, int] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    saved_version: int | None = None
    first_version: int = 0
    kept: dict[int, KeptMembers] = field(default_factory=dict)

    @property
    def measured(self) -> frozenset[int]:
        """Batches after which there was an evaluation that has ended."""
        return frozenset(evaluation.batch for evaluation in self.evaluations)

    def is_complete(self, steps: int, evaluator: Evaluator | None) -> bool:
        """Whether nothing is left to do of a run of `steps` batches. One that has begun counts: its record is whole."""
        state = self.state
        return nothing_left(
            steps=steps,
            batches=state.batches + (state.training is not None),
            is_saved=state.training is None and self.saved_version == state.version,
            is_measured=(
                evaluator is None
                or state.batches in self.measured
                or not evaluator.trajectories_per_row(state.batches, at_end=True)
            ),
            status=self.log.status,
        )

    def started_again(self) -> Iterator[dict[str, Any]]:
        """The `retry` event of each trajectory that was begun and is to begin anew."""
        for group in self.state.outstanding:
            kept = self.kept[group]
            for member, logged in sorted(self._logged(group).items()):
                if _is_begun(logged) and member not in kept.ended and member not in kept.running:
                    yield {
                        "group": group,
                        "trajectory": f"{group}.{member}",
                        "attempt": logged.attempt + 1,
                        "cause": "the run was resumed",
                        "tokens": logged.tokens,
                    }

    @property
    def pinned_versions(self) -> set[int]:
        """Of the trajectories that go on."""
        running = [one for kept in self.kept.values() for one in kept.running.values()]
        return {one.version for one in running if one.version is not None}

    def keep(self, saved: Mapping[int, KeptMembers]) -> None:
        """Note what of each outstanding group need not be done again: of `saved`, only what the log tells, too."""
        for group, outstanding in self.state.outstanding.items():
            found, members = saved.get(group, KeptMembers()), self._logged(group)

            def same(member: int, state: str, trajectory: Trajectory) -> bool:
                logged = members.get(member)  # noqa: B023 (used at once)
                if logged is None or found.attempts.get(member, 0) != logged.attempt:  # noqa: B023
                    return False  # an attempt that the log has lost may have had segments of the same lengths
                return logged.state == state and logged.tells_all_of(trajectory)

            ended = {m: one for m, one in found.ended.items() if same(m, "ended", one)}
            running = {
                m: one
                for m, one in found.running.items()
                if same(m, "running", one.trajectory)
                and one.version == members[m].pinned
                and (one.version is None or self.first_version <= one.version <= self.state.version)
            }
            again = {m: one.attempt + (_is_begun(one) and m not in ended | running) for m, one in members.items()}
            discarded = {m for m, one in members.items() if one.state == "discarded"}
            failures = {m: one.failures for m, one in members.items()}
            self.kept[group] = KeptMembers(outstanding.handed_over, discarded, ended, running, again, failures)

    def _logged(self, group: int) -> dict[int, LoggedMember]:
        """What the log says of the members of an outstanding group that have not been handed over."""
        left = set(range(self.log.group_size)) - self.state.outstanding[group].handed_over
        return {member: self.log.member(group, member) for member in left}

    def unfinished_evaluation(self, evaluator: Evaluator, num_slots: int) -> tuple[int, int] | None:
        """(batches, version) of the one that was launched and has not ended: the latest that was due. It is none of
        ours if it is due now, or if the trajectories that go on need all slots: it failed, then, and had lost its own.
        """
        for batches in range(self.state.batches - 1, -1, -1):
            if evaluator.trajectories_per_row(batches, at_end=False):
                version = self.versions.get(batches) if batches else 0  # None: its line of metrics.jsonl was lost
                is_owed = batches not in self.measured and version is not None and version >= self.first_version
                has_slot = len(self.pinned_versions | {self.state.version, version}) <= num_slots
                return (batches, version) if is_owed and has_slot else None
        return None


def find_run(path: str | os.PathLike[str], description: Mapping[str, Any]) -> Path:
    """The directory of a run that can go on as one of `description`. Raises ConfigError."""
    if goes_on_from_start(path):
        complete_checkpoints(path)  # warns of those that are not
    else:
        require_checkpoints(path)
    stored = read_config(path)
    warn_of_versions(stored, description)
    refuse_changed(stored, description)
    saved, _ = find_checkpoints(path)
    if saved and "recipe" in (state := saved[0].state()):  # another one only if config.json was edited since
        refuse_changed(json.loads(state["recipe"]), stored)
    return Path(path)


def read_resumption(run_dir: Path) -> Resumption:
    """Of a run whose directory is ours alone: what a death left torn or untold in its logs is mended. Raises
    JournalError, CheckpointError, and RunError.
    """
    cut_torn_tail(run_dir / METRICS)
    if cut_torn_tail(run_dir / EVALUATIONS):
        warn_of_run(
            f"The last line of {run_dir / EVALUATIONS} was torn, and is cut off: what that evaluation measured is lost,"
            " unless it can be measured again now."
        )
    versions = _versions(run_dir / METRICS)
    num_steps = max(versions, default=0)
    log = complete_log(run_dir, num_steps)
    saved, _ = find_checkpoints(run_dir)  # `find_run` has warned of others
    state, ordinal = start_of(saved[0] if saved else None)
    if saved or not is_blank(run_dir):  # else there may be no journal yet
        for record in read(run_dir, ordinal):
            state.apply(record)
    if state.training is not None and state.training.record.step <= num_steps:
        state.finish_batch()
    num_begun = state.batches + (state.training is not None)
    cut_torn_tail(run_dir / TRAJECTORIES, lambda line: not _is_later(line, num_begun))
    if num_steps > state.batches:
        raise JournalError(
            f"{run_dir / METRICS} tells of {num_steps} batches, but the journal of {state.batches}: files of it "
            "were lost; put them back."
        )
    trained = range(1, state.batches + 1)
    if lost := [step for step in trained if step not in versions]:
        warn_of_run(
            f"{run_dir / METRICS} lacks the lines of {len(lost)} batches, from {lost[0]} to {lost[-1]}: they were "
            "trained, and what was measured of them is lost."
        )
    resumption = Resumption(
        state=state,
        log=log,
        versions=versions,
        evaluations=_evaluations(run_dir / EVALUATIONS),
        saved_version=saved[0].version if saved else None,
        first_version=_first_version(run_dir, saved),
    )
    resumption.keep(read_kept(run_dir))
    return resumption


def _is_later(line: Mapping[str, Any], batch: int) -> bool:
    """Whether a line of trajectories.jsonl is of a batch after `batch`. They are written before their batch's record:
    of one without a record nothing is told yet, as another batch may come of it.
    """
    step = line.get("step")
    return type(step) is int and step > batch


def _versions(path: Path) -> dict[int, int]:
    """The version after each batch, by metrics.jsonl."""
    versions, last = {}, 0
    for begins, line in read_lines(path):
        step, version = line.get("step"), line.get("model_step")
        if type(step) is not int or type(version) is not int or step <= last:
            raise RunError(
                f"{path} has a line at byte {begins} that can't follow batch {last}: {line!r:.80}. Put back a good "
                "copy of the file."
            )
        versions[step] = version
        last = step
    return versions


def _evaluations(path: Path) -> tuple[Evaluation, ...]:
    """Those that eval.jsonl tells of."""
    found = []
    for begins, line in read_lines(path):
        try:
            found.append(Evaluation(**line | {"row_rewards": tuple(line["row_rewards"])}))
        except (LookupError, TypeError) as error:
            raise RunError(
                f"{path} has a line at byte {begins} that tells of no evaluation ({error}): {line!r:.80}. Put back a "
                "good copy of the file."
            ) from error
    return tuple(found)


def _first_version(run_dir: Path, saved: Sequence[SavedCheckpoint]) -> int:
    """The oldest that replay can reach. The journal may begin after a checkpoint that stays for its weights alone."""
    starts = [(0, FIRST_JOURNAL_FILE), *((one.version, one.journal) for one in saved)]
    return min((version for version, file in starts if path_of(run_dir / JOURNAL, file).exists()), default=0)


def _is_begun(logged: LoggedMember) -> bool:
    return logged.state in ("running", "ended")


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
