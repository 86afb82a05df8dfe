"""What goes into the rollouts and what comes out: groups are admitted, kept, or given up and replaced.

A group is given up when a trajectory of it fails (`on_failure="replace"`) or when its rewards are all equal
(`zero_variance="replace"`). Its reservation goes back and the next group is admitted in its place, at once, whatever
the trainer is doing: `schedule.py` says why the bound holds all the same.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

from pipeline.advantages import all_equal
from pipeline.batches.truncation import baseline_rewards
from pipeline.errors import RunError
from pipeline.journal.recorder import Recorder
from pipeline.processes.active_run import ActiveRun
from pipeline.rollouts.kept_members import KeptMembers
from pipeline.rollouts.rollouts import Rollouts
from pipeline.rollouts.running_group import GroupFailed
from pipeline.schedule import Admission, Scheduler
from pipeline.trainer_config import TrainerConfig
from pipeline.trajectory import Group
from shm.errors import HeadwayError

# So many groups given up one after another, with none kept between them, end the run: this many, or batches' worth.
MAX_GIVEN_UP = 256
MAX_GIVEN_UP_BATCHES = 8
# Fewer of those that took too long: with the default limits one takes half an hour. This many, or rounds of as many as
# run at a time.
MAX_TOO_LONG = 8
MAX_TOO_LONG_ROUNDS = 2


class DataUsedUp:
    """Comes out of `Intake.get` when a group was given up and no row is left to replace it: batches get shorter."""


class Intake:
    """Between the schedule and the rollouts of one run."""

    def __init__(
        self, config: TrainerConfig, run: ActiveRun, scheduler: Scheduler, rollouts: Rollouts, recorder: Recorder
    ) -> None:
        self._config = config
        self._run = run
        self._recorder = recorder
        self._scheduler = scheduler
        self._rollouts = rollouts
        self._results: asyncio.Queue[Group | DataUsedUp | BaseException] = rollouts.completed
        self._in_a_row = 0  # given up since a group was kept
        self._limit = max(MAX_GIVEN_UP, MAX_GIVEN_UP_BATCHES * config.groups_per_step)
        self._too_long_in_a_row = 0  # of those, since a group ended
        at_a_time = min(scheduler.rules.target, max(1, config.engine.schedule.concurrency // config.group_size))
        self._too_long_limit = max(MAX_TOO_LONG, MAX_TOO_LONG_ROUNDS * at_a_time)
        self._closed = False
        self._epoch = 0
        rollouts.deliver = self._deliver

    @property
    def given_up(self) -> Counter[str]:
        """Groups that are "failed" and "filtered", over the run."""
        return self._recorder.state.given_up

    @property
    def epoch(self) -> int:
        """Of the newest reservations in the ledger."""
        return self._epoch

    @property
    def empty(self) -> bool:
        return self._results.empty()

    @property
    def depth(self) -> int:
        """Finished groups that nobody has pulled yet."""
        return self._results.qsize()

    def resume(self, kept: Mapping[int, KeptMembers]) -> None:
        """Go on where an earlier run stood: what was finished comes once more, what was not is sampled. kept: what of
        the outstanding groups need not be.
        """
        state = self._recorder.state
        self.write_reservations()
        for result in state.ready:
            self._results.put_nowait(result)
        admissions = [Admission(group, one.row, one.version) for group, one in state.outstanding.items()]
        self._rollouts.start(admissions, kept)

    def admit(self) -> None:
        """The round of admission that starts a batch."""
        self._start(self._scheduler.admit())

    def write_reservations(self) -> None:
        """Tell the ledger, where the learner's gate reads them."""
        self._epoch += 1
        self._run.ledger.write_reservations(self._epoch, self._scheduler.reservations())

    def get_nowait(self) -> Group | DataUsedUp | BaseException:
        """The next result; there must be one."""
        return self._results.get_nowait()

    async def get(self, timeout: float) -> Group | DataUsedUp | BaseException:
        """The next result, in order of completion. Raises TimeoutError after `timeout` seconds."""
        if not self._results.empty():
            return self.get_nowait()
        async with asyncio.timeout(timeout):
            return await self._results.get()

    def close(self, error: BaseException) -> None:
        """Nobody is let in any more; whoever pulls gets `error` after what is finished."""
        self._closed = True
        self._rollouts.interrupt(error)

    def _start(self, admissions: list[Admission]) -> None:
        self.write_reservations()
        for admission in admissions:
            self._recorder.admitted(admission, self._rollouts.row_id(admission.row))
        self._rollouts.start(admissions)

    def _deliver(self, result: Group | GroupFailed) -> None:
        """Called by the rollouts whenever a group has ended: also in callbacks, where an error would reach nobody."""
        try:
            self._take(result)
        except HeadwayError as error:  # the disk is full, say
            self._run.fail(error)

    def _take(self, result: Group | GroupFailed) -> None:
        if isinstance(result, GroupFailed):
            self._too_long_in_a_row += result.took_too_long
            self._give_up("failed", result.group, result.cause, result.tokens)
            return
        self._too_long_in_a_row = 0
        if self._config.zero_variance == "replace" and self._is_zero_variance(result):
            tokens = sum(one.generated_tokens for one in result.trajectories)
            self._give_up("filtered", result.group, "zero_variance", tokens)
        else:
            self._in_a_row = 0
            self._recorder.ready(result)
            self._results.put_nowait(result)

    def _is_zero_variance(self, group: Group) -> bool:
        """No reward differs from the group's own baseline. One with too few rewards for a baseline of its own is
        measured against its batch, so it may well have a gradient; one without any never has.
        """
        rewards = baseline_rewards(group.trajectories, self._config.truncation)
        num_usable = sum(reward is not None for reward in rewards)
        return (num_usable == 0 or num_usable >= self._config.completion.min_members) and all_equal(rewards)

    def _give_up(self, event: str, group: int, cause: str, tokens: int) -> None:
        if self._closed:  # the run is ending: nothing is decided about this group any more
            return
        self._recorder.given_up(event, group, cause, tokens, was_ready=event == "filtered")
        self._in_a_row += 1
        admission = self._scheduler.replace(group)
        self._start([] if admission is None else [admission])
        why = self._why_hopeless(event)
        if why:
            self.close(RunError(f"{why}. The last: group {group}: {cause}"))
        elif admission is None:
            self._results.put_nowait(DataUsedUp())

    def _why_hopeless(self, event: str) -> str:
        """Empty while another group may still be kept. event: of the latest that was given up."""
        if self._too_long_in_a_row >= self._too_long_limit:
            return (
                f"{self._too_long_in_a_row} groups in a row were given up because a trajectory took too long, and none "
                "ended between them, so nothing can be trained; see to what your environment waits for, or raise "
                "environment_timeout"
            )
        if self._in_a_row < self._limit:
            return ""
        failed, filtered = (self._recorder.state.given_up[kind] for kind in ("failed", "filtered"))
        look_at = "environment's errors (logs/)" if event == "failed" else "task's rewards"
        return (
            f"{self._in_a_row} groups in a row were given up and none was kept ({failed} failed and {filtered} had "
            f"equal rewards so far), so nothing can be trained; look at the {look_at}"
        )
