"""The evaluations of one run: at most one at a time, beside training, pinned to the version it was launched at.

Each has an engine of its own on the run's samplers and environments, and holds its version's slot by a lease from
launch to end. Its groups are -1, -2, …, one per held-out row: noise and environment seeds are functions of (seed,
group, member), so they are never training's, and the same in every evaluation of a run, which compares policies on
equal terms.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipeline.batches.truncation import why_nothing_was_sampled
from pipeline.chat.format import ChatFormat
from pipeline.dataset import ENVIRONMENT_KEY, row_id
from pipeline.errors import RunError, TrajectoryError
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.opening import Stopped
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.rollouts import GroupFailed, RolloutRules, Rollouts
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.run_dir.json_lines import JsonLines
from pipeline.schedule import Admission
from pipeline.stalls.waits import LOOK_SECONDS, Culprit, Waits
from pipeline.trainer_config import EngineConfig
from pipeline.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where those of a run's evaluations go, and which there are.

    lines: eval.jsonl. done: in order, those of an earlier run in the same directory included. first_version: what they
    call version 0. measured: batches after which an earlier run has evaluated.
    """

    lines: JsonLines
    done: list[Evaluation]
    first_version: int = 0
    measured: Collection[int] = ()

    def called(self, version: int) -> int:
        return version + self.first_version


class Evaluations:
    """Launches what is due and waits where it must.

    on_failure(error) is told at once when an evaluation fails, so that training ends after the update that has begun;
    `launch` and `finish` raise the error. A set `stop_asked` ends their waits with Stopped. oldest_first: as in the
    rollouts of training, so that their requests queue on equal terms.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        config: EngineConfig,
        run: ActiveRun,
        chat: ChatFormat,
        *,
        results: Results,
        waits: Waits,
        stop_asked: asyncio.Event,
        on_failure: Callable[[BaseException], None],
        oldest_first: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._evaluator = evaluator
        self._config = config
        self._run = run
        self._chat = chat
        self._results = results
        self._waits = waits
        self._stop_asked = stop_asked
        self._on_failure = on_failure
        self._oldest_first = oldest_first
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._version = 0  # of the latest
        self._has_result = True  # so has the latest
        self._rows_done = 0  # of the latest
        self._rollouts: Rollouts | None = None  # of the one that runs
        self._wait_seconds = 0.0
        self._counters = SamplingCounters()  # what it samples is none of training's

    def due(self, batches: int, *, at_end: bool = False) -> bool:
        """Whether `launch` will start one."""
        if batches in self._results.measured:
            return False
        return self._evaluator.trajectories_per_row(batches, at_end=at_end) > 0

    async def launch(self, batches: int, *, at_end: bool = False) -> None:
        """Start the evaluation that is due after `batches`, if any, when the one before has ended. at_end: no batch
        follows.
        """
        self._check()
        if not self.due(batches, at_end=at_end):
            return
        await self._wait(batches if at_end else batches + 1)
        group_size = self._evaluator.trajectories_per_row(batches, at_end=at_end)
        # At the end nothing trains any more: there is nobody to leave samplers to.
        self._launch(self._run.slots.committed, batches, group_size, leaves_room=not at_end)

    def launch_again(self, batches: int, version: int) -> None:
        """Start the evaluation that an earlier run had launched after `batches`, at `version`, and not finished."""
        self._launch(version, batches, self._evaluator.trajectories_per_row(batches, at_end=False), leaves_room=True)

    def _launch(self, version: int, batches: int, group_size: int, *, leaves_room: bool) -> None:
        schedule = self._config.schedule
        concurrency = schedule.evaluation_concurrency if leaves_room else schedule.concurrency
        self._run.slots.lease(version)  # now, not in the task: the next update may pick its slot before that begins
        self._version, self._rows_done, self._has_result = version, 0, False
        self._task = asyncio.get_running_loop().create_task(self._evaluate(version, batches, group_size, concurrency))
        self._task.add_done_callback(self._ended)

    async def finish(self, batches: int) -> None:
        """Wait for the one that runs."""
        await self._wait(batches)

    async def stop(self) -> None:
        """Cancel the one that runs: it leaves an event, and no result."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def owed_version(self) -> int | None:
        """That of the latest evaluation, if it has no result: a resumed run makes it again, whatever cut it off."""
        return None if self._has_result else self._version

    @property
    def rows_done(self) -> int:
        """Of the latest evaluation."""
        return self._rows_done

    def take_metrics(self) -> dict[str, float]:
        """Since the last call; see docs/metrics.md."""
        seconds, self._wait_seconds = self._wait_seconds, 0.0
        return {"evaluation/wait_seconds": seconds, "evaluation/retries": self._counters.take()["recovery/retries"]}

    # --- waiting -------------------------------------------------------------------------------------------------

    async def _wait(self, step: int) -> None:
        """For the end of the one that runs; `step`: the batch that waits for it, in the log."""
        if self._stop_asked.is_set():
            raise Stopped
        if self._task is None or self._task.done():
            return self._check()
        began = self._clock()
        stop = asyncio.ensure_future(self._stop_asked.wait())
        self._waits.begin(step, self._culprit())
        try:
            while True:
                wanted = (self._task, stop)
                ended, _ = await asyncio.wait(wanted, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if ended:
                    break
                self._waits.look(self._culprit())
        finally:
            stop.cancel()
            self._wait_seconds += self._clock() - began
            self._waits.end()
        if not self._task.done():
            raise Stopped
        self._check()

    def _culprit(self) -> Culprit:
        rows = len(self._evaluator.holdout)
        version = self._results.called(self._version)
        detail = f"the evaluation of version {version}, which has finished {self._rows_done} of {rows} rows"
        held = self._rollouts.longest_at_one_thing() if self._rollouts is not None else None
        if held is not None:
            detail += f"; a trajectory of row {-1 - held.group} is in: {held.words}"
        return Culprit("evaluation", None, None, detail)

    def _check(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Here and not in the task: one that is cancelled before it begins runs none of its own code."""
        self._run.slots.release(self._version)
        if not task.cancelled() and task.exception() is not None:
            self._on_failure(task.exception())

    # --- one evaluation ------------------------------------------------------------------------------------------

    async def _evaluate(self, version: int, batch: int, group_size: int, concurrency: int) -> None:
        """Measure `version`, which is leased already, and tell the result everywhere."""
        rows, called = len(self._evaluator.holdout), self._results.called(version)
        began = self._clock()
        status, reward_mean = "failed", None
        try:
            trajectories = await self._roll_out(version, group_size, concurrency)
            seconds = self._clock() - began
            holdout = self._evaluator.holdout
            evaluation = summarize(trajectories, version=called, batch=batch, rows=holdout, seconds=seconds)
            self._results.lines.write(asdict(evaluation))
            self._results.lines.flush()
            status, reward_mean = "completed", evaluation.reward_mean
        except asyncio.CancelledError:
            status = "stopped"
            raise
        finally:
            self._run.events.log("evaluation", version=called, rows=rows, status=status, reward_mean=reward_mean)
        self._results.done.append(evaluation)
        self._has_result = True
        self._tell_sink(evaluation)

    async def _roll_out(self, version: int, group_size: int, concurrency: int) -> list[Trajectory]:
        """`group_size` trajectories of each row; when this returns or raises, none of them is left."""
        rows = self._evaluator.holdout
        rollouts = self._rollouts = Rollouts(
            self._config,
            self._run,
            self._chat,
            rows,
            group_size,
            RolloutLog(None, self._counters),
            RolloutRules(
                concurrency=concurrency,
                pinned=version,
                oldest_first=self._oldest_first,
                replace_failed=True,  # it comes out here: training may finish the update that it is at
            ),
        )
        try:
            rollouts.start([Admission(-1 - index, index, version) for index in range(len(rows))])
            trajectories: list[Trajectory] = []
            while self._rows_done < len(rows):
                result = await rollouts.completed.get()  # ends with the run at the latest: its failure comes out too
                if isinstance(result, BaseException):
                    raise result
                if isinstance(result, GroupFailed):
                    row = -1 - result.group
                    called = self._results.called(version)
                    raise TrajectoryError(f"The evaluation of version {called} failed at row {row}: {result.cause}")
                self._rows_done += 1
                trajectories += result.trajectories
            return trajectories
        finally:
            self._rollouts = None
            await rollouts.stop()

    def _tell_sink(self, evaluation: Evaluation) -> None:
        if self._evaluator.sink is None:
            return
        try:
            self._evaluator.sink(evaluation)
        except Exception as error:  # the user's code: whatever it raises ends the run, and is named
            raise RunError(
                f"Evaluator.sink raised {type(error).__name__} for the evaluation of version {evaluation.version}: "
                f"{error}. The result is in eval.jsonl; correct the function."
            ) from error


def summarize(
    trajectories: list[Trajectory], *, version: int, batch: int, rows: Sequence[dict], seconds: float
) -> Evaluation:
    """The measures of trajectories of each of `rows`. Raises RunError when nothing was sampled: no number would mean
    much.
    """
    if not any(one.generated_tokens for one in trajectories):
        raise RunError(
            f"The evaluation of version {version} sampled no token, so there is nothing to measure: "
            f"{why_nothing_was_sampled(trajectories)}"
        )
    means = _row_means(trajectories)
    rewards = np.sort([one.reward for one in trajectories])  # the order in which they ended must not show in a sum
    return Evaluation(
        version=version,
        batch=batch,
        rows=len(rows),
        trajectories=len(trajectories),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_stderr=_standard_error(list(means.values())),
        generated_tokens_mean=float(np.mean([one.generated_tokens for one in trajectories])),
        truncated_frac=float(np.mean([one.truncated is not None for one in trajectories])),
        seconds=seconds,
        row_rewards=tuple(_row_reward(row, rows[row], mean) for row, mean in sorted(means.items())),
    )


def _row_means(trajectories: list[Trajectory]) -> dict[int, float]:
    """Row (its index) -> mean reward."""
    by_row: dict[int, list[float]] = {}
    for one in trajectories:
        by_row.setdefault(one.row, []).append(one.reward)
    return {row: float(np.mean(np.sort(rewards))) for row, rewards in by_row.items()}


def _row_reward(index: int, row: dict, mean: float) -> dict[str, Any]:
    found = row_id(row)
    of_mix = {ENVIRONMENT_KEY: row[ENVIRONMENT_KEY]} if ENVIRONMENT_KEY in row else {}
    return {"row": index} | ({} if found is None else {"id": found}) | of_mix | {"reward_mean": mean}


def _standard_error(means: list[float]) -> float:
    """Of the mean reward, by the rows' means; 0 with a single row."""
    if len(means) == 1:
        return 0.0
    return float(np.sort(means).std(ddof=1) / np.sqrt(len(means)))
