"""The samplers of one run: their clients, and a new process where one has died."""

import asyncio
from functools import partial
from typing import Any

from pipeline.gather import gather_all
from pipeline.processes.sampler.sampler_client import RequestLimit, SamplerClient
from pipeline.processes.worker.restarts import Restarts
from pipeline.processes.worker.run_blocks import RunBlocks
from pipeline.processes.worker.run_ends import RunEnds
from pipeline.processes.worker.run_workers import RunWorkers
from pipeline.run_dir.events import EventLog
from workers.errors import WorkerDied, WorkerFailed


class RunSamplers:
    """`clients` in the order of the processes."""

    def __init__(
        self,
        workers: RunWorkers,
        blocks: RunBlocks,
        events: EventLog,
        ends: RunEnds,
        max_requests: int,
    ) -> None:
        """max_requests: at all samplers at once."""
        self._workers = workers
        self._blocks = blocks
        self._ends = ends
        self._restarts = Restarts("Samplers", workers, events, ends.fail)
        self._slot_fields: dict[str, Any] = {}
        self._weights_there = asyncio.Event()
        limit = RequestLimit(max_requests)
        self.clients = [SamplerClient(index, limit, ends.on_error) for index in range(len(workers.samplers))]

    @property
    def num_restarts(self) -> int:
        """So far."""
        return self._restarts.count

    async def start(self, slot_fields: dict[str, Any]) -> None:
        """Have all of them serve. slot_fields: where the weights are, from the learner's Ready. Raises what
        `RunWorkers.start` does.
        """
        self.find_weights(slot_fields)
        handles = enumerate(self._workers.samplers)
        await gather_all(*(self._restarts.start(handle, partial(self._start, index)) for index, handle in handles))

    def lose_weights(self) -> None:
        """The slots' memory has gone, with the learner whose it was: nobody may compute with it, or begin to. Each
        sampler's place is taken by a new process, which starts when there are weights again.
        """
        self._weights_there.clear()
        lost = WorkerDied("The weights that it computed with went with the learner that died.")
        for client, handle in zip(self.clients, self._workers.samplers, strict=True):
            serves = client.is_connected  # and not: says that it is ready, which its starter has yet to hear
            client.disconnect()
            if serves:
                handle.discard()
                self._ends.spawn_task(self._restart(client.index, lost, is_accident=False))
            else:
                handle.kill()  # it may have been told of the old slots; who starts it starts another one

    def find_weights(self, slot_fields: dict[str, Any]) -> None:
        """There are slots with weights, as the learner's Ready says: samplers may start."""
        self._slot_fields = slot_fields
        self._weights_there.set()

    def release_version(self, version: int) -> None:
        """Nobody holds `version` any more: they may let go of its weights and shared prompts."""
        for client in self.clients:
            client.release_version(version)

    def fail(self, error: BaseException) -> None:
        """The run has failed: whoever waits for a segment gets `error`."""
        self._weights_there.set()  # for who waits for them, and is told at the next step
        for client in self.clients:
            client.fail(error)

    async def _start(self, index: int) -> None:
        handle, client = self._workers.samplers[index], self.clients[index]
        await self._weights_there.wait()  # ends with the learner's start, or with the run
        requests, replies, room, fields = self._blocks.sampler_queues(index)
        config = self._blocks.sampler_config(index, self._slot_fields) | fields
        try:
            await self._workers.start(handle, config, lambda error: self._died(index, error))
        except WorkerFailed as error:
            if self._weights_there.is_set():
                raise
            raise WorkerDied(str(error), by_signal=True) from error  # what it was to open went with the learner
        handle.on_message = client.receive
        client.connect(handle.send, requests, replies, room)

    def _died(self, index: int, error: WorkerDied) -> None:
        """A dead sampler is restarted; its trajectories keep their leases, so the same versions are still there. One
        that broke a rule is not: it would be asked the same again.
        """
        self.clients[index].disconnect()
        if isinstance(error, WorkerFailed):
            self._ends.fail(error)
        elif self._workers.failure is None:
            self._ends.spawn_task(self._restart(index, error))

    async def _restart(self, index: int, error: WorkerDied, *, is_accident: bool = True) -> None:
        handle, start = self._workers.samplers[index], partial(self._start, index)
        await self._restarts.restart(handle, start, error, is_accident=is_accident)
