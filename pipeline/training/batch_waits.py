"""The trainer's waits within a batch, for the next finished group and for a free slot: how long, and whom for."""

import asyncio
from collections.abc import Callable

from pipeline.processes.active_run import ActiveRun
from pipeline.processes.process_metrics import TimeAccount
from pipeline.rollouts.rollouts import Rollouts
from pipeline.schedule import Blocked, Scheduler
from pipeline.trainer_config import TrainerConfig
from pipeline.training.intake import DataUsedUp, Intake
from pipeline.trajectory import Group
from pipeline.waits import LOOK_SECONDS, Culprit, Waits


class BatchWaits:
    """Waits of one run, told to `waits` and booked in `time_account`."""

    def __init__(
        self,
        config: TrainerConfig,
        run: ActiveRun,
        scheduler: Scheduler,
        rollouts: Rollouts,
        intake: Intake,
        waits: Waits,
        time_account: TimeAccount,
        clock: Callable[[], float],
        *,
        ended_by: Callable[[], BaseException | None],
    ) -> None:
        """ended_by() is what a wait for a slot ends with, whenever `lease_returned` is set; None: it goes on."""
        self._config = config
        self._run = run
        self._scheduler = scheduler
        self._rollouts = rollouts
        self._intake = intake
        self._waits = waits
        self._time_account = time_account
        self._clock = clock
        self._ended_by = ended_by

    async def next_result(self, n: int, blocked: Blocked) -> Group | DataUsedUp:
        """For batch `n`, in order of completion. Raises what ended the run."""
        if self._scheduler.pull_counts_as_wait():
            self._waits.begin_counting(self._culprit(blocked).why)
        if self._intake.empty:
            self._waits.begin(n, self._culprit(blocked))
        self._time_account.switch("waiting")
        while True:
            try:
                result = await self._intake.get(LOOK_SECONDS)
                break
            except TimeoutError:
                if self._intake.empty:  # else it came in this very tick
                    self._waits.look(self._culprit(blocked))
        self._time_account.switch("busy")
        if isinstance(result, BaseException):
            self._waits.end()
            raise result
        self._waits.end_counting()
        return result

    async def free_slot(self, n: int) -> int:
        """The slot for the version after batch `n`. Under `wait` one is free, but for the last request of a group that
        was given up; otherwise trajectories under old versions may hold them all, and end without the trainer's help.
        """
        slots, began = self._run.slots, self._clock()
        while (slot := slots.slot_for_next()) is None:
            self._waits.begin(n, self._slot_culprit())
            self._time_account.switch("waiting")
            slots.lease_returned.clear()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await slots.lease_returned.wait()
            except TimeoutError:
                self._waits.look(self._slot_culprit())
            self._waits.slot_seconds = self._clock() - began
            self._time_account.switch("busy")
            if (error := self._ended_by()) is not None:
                self._waits.end()
                raise error
        self._waits.end()
        return slot

    def _culprit(self, blocked: Blocked) -> Culprit:
        held = self._rollouts.doing(blocked.group)
        if blocked.why == "ready":
            detail = f"too few finished groups; group {blocked.group} is the oldest unfinished one ({held.words})"
            if self._config.stale_policy == "wait":
                detail += f"; {self._scheduler.pending} of {self._config.groups_per_step} are finished"
            return Culprit("ready", blocked.group, held.trajectory, detail)
        deadline = self._scheduler.deadline(blocked.group)
        who = "it is" if held.trajectory is None else f"trajectory {held.trajectory} is in:"
        detail = f"group {blocked.group} must train by version {deadline}; {who} {held.words}"
        return Culprit(held.cause, blocked.group, held.trajectory, detail)

    def _slot_culprit(self) -> Culprit:
        held = self._rollouts.holding_oldest()
        all_leased = f"all {self._run.spec.num_slots} weight slots are leased"
        if held is None:
            return Culprit("slot", None, None, f"{all_leased}, by an evaluation at least; its end gives one back")
        detail = f"{all_leased}; trajectory {held.trajectory} holds the oldest version, and is in: {held.words}"
        return Culprit("slot", held.group, held.trajectory, detail)
