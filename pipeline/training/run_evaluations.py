"""The evaluations of a run as its training sees them: when one begins, what is saved for it, which version is best."""

from collections.abc import Sequence

from pipeline.checkpoints.checkpoints import Checkpoints
from pipeline.evaluation.evaluations import Evaluations
from pipeline.evaluation.evaluator import Evaluation
from pipeline.processes.process_metrics import TimeAccount
from pipeline.schedule import Scheduler
from pipeline.training.run_saver import RunSaver


class RunEvaluations:
    """Of one run that is under way. evaluations: None if nothing is held out, and then nothing here does anything.

    done: those that have ended. keep_best: whether checkpoints stay by what evaluations say of them.
    """

    def __init__(
        self,
        evaluations: Evaluations | None,
        done: Sequence[Evaluation],
        scheduler: Scheduler,
        checkpoints: Checkpoints,
        saver: RunSaver,
        time_account: TimeAccount,
        *,
        keep_best: bool,
    ) -> None:
        self._evaluations = saver.evaluations = evaluations
        self._done = done
        self._scheduler = scheduler
        self._checkpoints = checkpoints
        self._saver = saver
        self._time_account = time_account
        self._keep_best = keep_best

    def launch_again(self, unfinished: tuple[int, int] | None) -> None:
        """unfinished: (batches, version) of the one that an earlier run had launched and not finished, if there is
        one.
        """
        if self._evaluations is not None and unfinished is not None:
            self._evaluations.launch_again(*unfinished)
            self._checkpoints.evaluating(unfinished[1])

    async def launch(self, *, at_end: bool = False) -> None:
        """The evaluation that is due, if any, of weights that are kept if only the best are to stay. at_end: no batch
        follows.
        """
        if self._evaluations is None:
            return
        batches = self._scheduler.batches
        if self._keep_best:
            self._tell_scores()
            if self._evaluations.due(batches, at_end=at_end):
                self._checkpoints.evaluating(self._scheduler.version)
                await self._saver.save(may_fail=True)
        self._time_account.switch("waiting")  # unless one still runs, for no time
        await self._evaluations.launch(batches, at_end=at_end)

    async def finish(self) -> None:
        """After the last batch: launch what is due then, and wait for it."""
        if self._evaluations is not None:
            await self.launch(at_end=True)
            await self._evaluations.finish(self._scheduler.batches)
            self._tell_scores()

    async def stop(self) -> None:
        """Cancel the one that runs."""
        if self._evaluations is not None:
            await self._evaluations.stop()

    def take_metrics(self) -> dict[str, float]:
        """Since the last call."""
        return {} if self._evaluations is None else self._evaluations.take_metrics()

    def _tell_scores(self) -> None:
        """Which versions are the best, for `keep_best`."""
        for evaluation in self._done:
            self._checkpoints.scored(evaluation.version, evaluation.reward_mean)
