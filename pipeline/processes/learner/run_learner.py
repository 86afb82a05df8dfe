"""The learner of one run: its start, from saved weights if need be, and a new process where it has died."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import RunError, of_a_message
from pipeline.processes.learner.learner_client import LearnerClient
from pipeline.processes.learner.learner_history import LearnerHistory, NothingTrained
from pipeline.processes.learner.learner_replay import NOWHERE, LearnerReplay
from pipeline.processes.learner.slot_table import SlotTable
from pipeline.processes.worker.restarts import Restarts
from pipeline.processes.worker.run_blocks import RunBlocks
from pipeline.processes.worker.run_ends import RunEnds
from pipeline.processes.worker.run_workers import RunWorkers
from pipeline.run_dir.events import EventLog
from pipeline.run_spec import RunSpec
from pipeline.user_warnings import warn_of_run
from workers.errors import WorkerDied, WorkerFailed
from workers.model_files.tensor_files import OPTIMIZER
from workers.transfer import Outbox


class RunLearner:
    """`client` speaks to the process that there is now.

    One that dies is started anew and brought to the committed version: nobody but who waits for an update sees that.
    Samplers go on meanwhile, in the slots that they have. Slots that died with it are made again, with the versions
    that somebody holds; `slots_lost()` is then called at once, `slots_made(fields)` when they are there.
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: RunWorkers,
        blocks: RunBlocks,
        slots: SlotTable,
        events: EventLog,
        ends: RunEnds,
        *,
        history: LearnerHistory | None,
        slots_lost: Callable[[], None],
        slots_made: Callable[[dict[str, Any]], None],
    ) -> None:
        """history: None of a run that can't be brought back."""
        self.client = LearnerClient()
        self._workers = workers
        self._handle = workers.learner
        self._blocks = blocks
        self._slots = slots
        self._history = NothingTrained() if history is None else history
        self._can_restart = history is not None or not spec.trains
        self._ends = ends
        self._slots_lost = slots_lost
        self._slots_made = slots_made
        self._restarts = Restarts("Learners", workers, events, ends.fail)
        self._replay: LearnerReplay | None = None
        self._ends_with: Exception | None = None  # what `end_soon` was told

    @property
    def num_restarts(self) -> int:
        """So far."""
        return self._restarts.count

    async def start(self, version: int, republish: Sequence[int]) -> dict[str, Any]:
        """Have it serve from `version` on, with the versions of `republish` resident, too. Returns where the slots are.
        Raises what `RunWorkers.start` does, or RunError when that can't be.
        """
        versions = sorted({*republish, version})
        if len(versions) > self._slots.num_slots or versions[-1] > version:
            raise RunError(
                f"Versions {versions} are to be resident at version {version}, in {self._slots.num_slots} slots; none "
                "may be newer, and each needs a slot."
            )
        slots_of = {resident: slot for slot, resident in enumerate(versions)}
        fields: dict[str, Any] = {}

        async def start() -> None:
            fields.update(await self._start(version, slots_of, oldest=versions[0]))

        await self._restarts.start(self._handle, start)
        self._slots.restored(slots_of, version)
        await self._connect()
        return fields

    def fail(self, error: Exception) -> None:
        """The run has failed: whoever waits for the learner gets `error`."""
        self.client.fail(error)
        if self._replay is not None:
            self._replay.fail(error)

    def end_soon(self, error: Exception) -> None:
        """The run is to end, and to bring a learner back takes too long for that. Whoever waits for one that is away,
        or dies from now on, gets `error`. What it was to train is in the history.
        """
        self._ends_with = error
        if self.client.is_away:
            self.discard(error)

    def discard(self, error: Exception) -> None:
        """End it at once: nothing of what it is at may come to be. Whoever waits for it gets `error`."""
        self._handle.discard()
        self.client.lose(error)

    async def _restart(self) -> None:
        """One in a dead one's place."""
        if not self._blocks.slots_outlive_learner:  # holds that were given back since it died
            self._slots.forget_unheld()
        committed, slots_of = self._slots.committed, self._slots.held
        if self.client.published is not None:  # it may be known here and not yet have been told there
            committed = max(committed, self.client.published[0])
            slots_of |= {self.client.published[0]: self.client.published[1]}
        oldest = committed if self._blocks.slots_outlive_learner else min(slots_of)
        try:
            fields = await self._start(committed, slots_of, oldest)
        except WorkerDied:
            if self.client.is_lost:  # the run is to end, which ended this one, too: none takes its place
                return
            raise
        if not self._blocks.slots_outlive_learner:
            self._slots_made(fields)
        await self._connect()

    async def _start(self, version: int, slots_of: Mapping[int, int], oldest: int) -> dict[str, Any]:
        """A process at `version`, which has come by `oldest` on its way, with the versions that it came by in their
        slots. Returns where the slots are.
        """
        base, directory = await self._base(oldest) if oldest else (0, None)
        producer, queue = self._blocks.learner_queue()
        saved = {
            "weights": None if directory is None else str(directory),
            "optimizer": None if directory is None else str(directory / OPTIMIZER),
        }
        config = self._blocks.learner_config() | queue
        config |= {"base": saved | {"version": base, "slot": slots_of.get(base, NOWHERE)}, "replay_to": version}
        self._outbox = Outbox(producer, self._handle.send, "the learner")
        self._replay = LearnerReplay(self._outbox, self._handle.send)
        try:
            detail = await self._workers.start(self._handle, config, self._died)
            self._handle.on_error = self._unheard
            self._handle.on_message = self._replay.receive
            await self._replay.run(self._history.updates(base, version), base, version, slots_of)
            difference = max(detail["difference"], self._replay.largest_difference)
        finally:
            self._replay = None
        if difference:
            warn_of_run(
                f"The learner was brought back to version {version}, but its weights are up to {difference:.2g} away "
                "from those published before, so a computation of it is not repeatable (a GPU's sums, a loss of your "
                "own that draws numbers); the run goes on with the new ones."
            )
        return detail["slots"]

    async def _base(self, oldest: int) -> tuple[int, Path | None]:
        """See `LearnerHistory`. Beside the loop, for as long as somebody waits for it."""
        cancelled = threading.Event()
        try:
            return await asyncio.to_thread(self._history.base, oldest, cancelled.is_set)
        finally:
            cancelled.set()

    async def _connect(self) -> None:
        if self.client.is_lost:  # it was brought back although nobody waits for it any more
            return
        self._handle.on_message = self.client.receive
        await self.client.connect(self._outbox, self._handle.send)

    def _died(self, error: WorkerDied) -> None:
        """One that broke a rule is not started anew: it would be asked the same again."""
        if self._replay is not None:  # whoever waits for that has it in hand
            self._replay.fail(error)
            return
        if self._workers.failure is not None or isinstance(error, WorkerFailed) or not self._can_restart:
            self.client.lose(error)
            self._ends.fail(error)
            return
        self.client.disconnect(error)
        if not self._blocks.slots_outlive_learner:
            self._slots.forget_unheld()
            self._slots_lost()
        if self._ends_with is not None:
            self.client.lose(self._ends_with)
            return
        self._ends.spawn_task(self._bring_back(error))

    async def _bring_back(self, error: WorkerDied) -> None:
        try:
            await self._restarts.restart(self._handle, self._restart, error)
        except asyncio.CancelledError:  # by the run's end, or by that of its event loop, which asks nobody: none comes
            self.discard(RunError("The learner was not brought back, as the run, or its event loop, ended."))
            raise

    def _unheard(self, error: Exception) -> None:
        """What it says can't be handled, so no answer of it may be waited for."""
        told = of_a_message(error)
        self.client.lose(told)
        self._ends.on_error(told)
