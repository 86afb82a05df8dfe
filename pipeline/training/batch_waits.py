"""The trainer's waits within a batch, for the next finished group and for a free slot: how long, and told to whom."""

import asyncio
from collections.abc import Callable

from pipeline.processes.learner.slot_table import SlotTable
from pipeline.processes.process_metrics import TimeAccount
from pipeline.schedule import Blocked
from pipeline.stalls.waits import LOOK_SECONDS, Waits
from pipeline.training.culprits import Culprits
from pipeline.training.intake import DataUsedUp, Intake
from pipeline.trajectory import Group


class BatchWaits:
    """Waits of one run, told to `waits` and booked in `time_account`."""

    def __init__(
        self,
        intake: Intake,
        slots: SlotTable,
        culprits: Culprits,
        waits: Waits,
        time_account: TimeAccount,
        clock: Callable[[], float],
        *,
        ended_by: Callable[[], BaseException | None],
    ) -> None:
        """ended_by() is what a wait for a slot ends with, whenever `lease_returned` is set; None: it goes on."""
        self._intake = intake
        self._slots = slots
        self._culprits = culprits
        self._waits = waits
        self._time_account = time_account
        self._clock = clock
        self._ended_by = ended_by

    async def next_result(self, n: int, blocked: Blocked, *, counts: bool) -> Group | DataUsedUp:
        """For batch `n`, in order of completion. counts: as a wait for the bound. Raises what ended the run."""
        if counts:
            self._waits.begin_counting(self._culprits.of_batch(blocked).why)
        if self._intake.empty:
            self._waits.begin(n, self._culprits.of_batch(blocked))
        self._time_account.switch("waiting")
        while True:
            try:
                result = await self._intake.get(LOOK_SECONDS)
                break
            except TimeoutError:
                if self._intake.empty:  # else it came in this very tick
                    self._waits.look(self._culprits.of_batch(blocked))
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
        slots, began = self._slots, self._clock()
        while (slot := slots.slot_for_next()) is None:
            self._waits.begin(n, self._culprits.of_slot())
            self._time_account.switch("waiting")
            slots.lease_returned.clear()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await slots.lease_returned.wait()
            except TimeoutError:
                self._waits.look(self._culprits.of_slot())
            self._waits.slot_seconds = self._clock() - began
            self._time_account.switch("busy")
            if (error := self._ended_by()) is not None:
                self._waits.end()
                raise error
        self._waits.end()
        return slot
