"""The supervisor's end of the learner: batches out through its queue, gradients and updates back."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from pipeline.errors import RunError
from pipeline.training_rows import Rows
from shm.queue import QueueProducer
from workers.errors import CheckpointError
from workers.messages import Consumed, ForwardBackward, GradientsDone, Message, OptimStep, Published, Save, Saved
from workers.transfer import Outbox

LEARNER_SECONDS = 3600.0  # bound on one forward/backward or update; a lost process is told much earlier
SAVE_SECONDS = 600.0  # bound on an ended run's update, and on saving its weights, beside what a slow disk needs
SLOW_DISK_BYTES_PER_SECOND = 20e6


class LearnerClient:
    """One batch at a time: `forward_backward` (once or in chunks), then `optim_step`."""

    def __init__(self, send: Callable[[Message], None], batches: QueueProducer) -> None:
        self._send = send
        self._outbox = Outbox(batches, send, "the learner")
        self._gradients: deque[asyncio.Future[dict[str, float]]] = deque()  # of what was sent, in order
        self._update: asyncio.Future[Published] | None = None
        self._answer: asyncio.Future[Published] | None = None  # to it: comes also when nobody waits for it any more
        self._saving: asyncio.Future[Saved] | None = None
        self._failure: Exception | None = None
        self._lost = False

    async def forward_backward(
        self, batch: int, rows: Rows, *, zero_gradients: bool
    ) -> asyncio.Future[dict[str, float]]:
        """Send rows, the whole batch or one chunk of it; the future is done, with the learner's metrics, when their
        gradients are.
        """
        self._check_alive()
        parts = rows.payload()
        future = asyncio.get_running_loop().create_future()
        self._gradients.append(future)
        position = await self._outbox.put(*parts)
        self._send(
            ForwardBackward(
                batch=batch,
                num_rows=rows.num_rows,
                num_tokens=rows.num_tokens,
                position=position,
                length=sum(part.nbytes for part in parts),
                zero_gradients=zero_gradients,
            )
        )
        return future

    async def optim_step(
        self,
        batch: int,
        *,
        from_version: int,
        slot: int,
        groups: Sequence[int],
        epoch: int,
        lr: float,
        gradient_scale: float,
    ) -> Published:
        """One optimizer update, through the gate, into `slot`; returns when it is published."""
        self._check_alive()
        self._update = asyncio.get_running_loop().create_future()
        self._answer = asyncio.get_running_loop().create_future()
        self._send(
            OptimStep(
                batch=batch,
                from_version=from_version,
                to_version=from_version + 1,
                slot=slot,
                groups=list(groups),
                epoch=epoch,
                lr=lr,
                gradient_scale=gradient_scale,
            )
        )
        try:
            published = await asyncio.wait_for(self._update, LEARNER_SECONDS)
        except TimeoutError:
            raise RunError(f"The learner has not answered update {batch} for {LEARNER_SECONDS:g} s.") from None
        self._answer = None
        return published

    async def settle(self) -> Published | None:
        """Wait for the answer to an update whose `optim_step` was cut off, by a cancellation or by the run's failure;
        None if there was no such update. Raises WorkerDied, or RunError after a time.
        """
        if self._answer is None:
            return None
        try:
            return await asyncio.wait_for(self._answer, SAVE_SECONDS)
        except TimeoutError:
            raise RunError(f"The learner has not answered its update for {SAVE_SECONDS:g} s.") from None

    async def save(self, version: int, path: str, optimizer_path: str | None, num_bytes: int) -> None:
        """Have it write `version`'s weights, and the optimizer's state unless `optimizer_path` is None, as safetensors
        files of about `num_bytes`. It may be asked after the run has failed, too: what it can't do is be dead. Raises
        CheckpointError when it could not write them.
        """
        self._saving = asyncio.get_running_loop().create_future()
        self._send(Save(version=version, path=path, optimizer_path=optimizer_path))
        seconds = SAVE_SECONDS + num_bytes / SLOW_DISK_BYTES_PER_SECOND
        try:
            saved = await asyncio.wait_for(self._saving, seconds)
        except TimeoutError:
            raise RunError(f"The learner has not saved version {version} within {seconds:.0f} s.") from None
        if saved.error is not None:
            raise CheckpointError(saved.error)

    def receive(self, message: Message) -> None:
        """A message of the learner."""
        if isinstance(message, GradientsDone | Published | Saved | Consumed):
            self._outbox.note_consumed(message.consumed)
        if isinstance(message, GradientsDone):
            if self._failure is not None:  # who asked for them has been told that the run is over
                return
            if not self._gradients:
                raise RunError(f"The learner tells of gradients of batch {message.batch}, which nobody has asked for.")
            future = self._gradients.popleft()  # the learner works in order
            if not future.done():
                future.set_result(message.metrics)
        elif isinstance(message, Published):
            for future in (self._update, self._answer):
                if future is not None and not future.done():
                    future.set_result(message)
        elif isinstance(message, Saved) and self._saving is not None and not self._saving.done():
            self._saving.set_result(message)

    def fail(self, error: Exception) -> None:
        """The run is over: whoever waits, or asks later, gets `error`."""
        self._failure = error
        self._outbox.fail(error)
        for future in [*self._gradients, self._update]:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # seen: nobody may be waiting for this one
        self._gradients.clear()

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be had of it any more, not even in a run that has failed."""
        return self._lost

    def lose(self, error: Exception) -> None:
        """Its process has ended, or can't be heard: who waits for what it does in a failed run gets `error`, too."""
        self._lost = True
        self.fail(error)
        for future in (self._answer, self._saving):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # seen: nobody may be waiting for this one

    def _check_alive(self) -> None:
        """It may have died while nobody waited for it, between two steps."""
        if self._failure is not None:
            raise self._failure
