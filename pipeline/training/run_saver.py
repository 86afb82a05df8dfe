"""When a run saves itself, and what: the learner's weights and optimizer, and with them where the journal stands."""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.checkpoints.checkpoints import Checkpoints
from pipeline.evaluation.evaluations import Evaluations
from pipeline.journal.journal_files import Journal
from pipeline.journal.log_bookmark import LogBookmark
from pipeline.journal.recorder import Recorder
from pipeline.journal.run_state import RunState
from pipeline.processes.active_run import ActiveRun
from pipeline.training.rollout_saver import RolloutSaver


class RunSaver:
    """Of one run that is under way. recipe: what its config.json says, plain values; a checkpoint tells, too, so that
    nobody changes it between two runs unseen. evaluations: the run's, if it has any.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        journal: Journal,
        recorder: Recorder,
        run: ActiveRun,
        rollouts: RolloutSaver,
        bookmark: LogBookmark,
        recipe: Mapping[str, Any],
    ) -> None:
        self._checkpoints = checkpoints
        self._journal = journal
        self._recorder = recorder
        self._run = run
        self._rollouts = rollouts
        self._bookmark = bookmark
        self._recipe = json.dumps(recipe)
        self.evaluations: Evaluations | None = None
        self.saves: int | None = None  # the version that is being saved, until older ones are removed, too

    async def save(self, *, may_fail: bool = False) -> None:
        """Make a checkpoint of the present version, between two batches; if there is one, the journal goes on from it.

        Its state is taken at once, and the journal goes on in a file of its own: whatever is decided while the learner
        writes comes after the state. Of a batch whose record is written and whose update is not known to be made, no
        state can tell: nothing is saved then, for what was saved before and the journal tell all of it. may_fail: warn,
        instead of raising CheckpointError. Raises RunError, WorkerDied.
        """
        state = self._recorder.state
        if state.training is not None:
            return
        self.saves = state.version
        try:
            await self._save(state, may_fail=may_fail)
        finally:
            self.saves = None

    async def _save(self, state: RunState, *, may_fail: bool) -> None:
        version = state.version
        if not self._checkpoints.has(version):
            kept = {"run": state.to_plain(), "journal": self._recorder.next_file(), "recipe": self._recipe}
            await self._checkpoints.save(self._run, version, kept, may_fail=may_fail)
            await self._rollouts.save()
        # What no recovery can need goes: replay must reach every version that somebody holds, or is owed.
        needed = [state.oldest_owed, *self._run.slots.leased]
        if self.evaluations is not None and self.evaluations.owed_version is not None:  # one cut off holds none
            needed.append(self.evaluations.owed_version)
        self._journal.remove_before(await self._checkpoints.prune(min(needed)))
        self._bookmark.save()
