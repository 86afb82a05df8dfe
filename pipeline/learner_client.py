"""The supervisor's end of the learner: batches out through its queue, gradients and updates back."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from pipeline.errors import RunError
from pipeline.rows import Rows
from shm.queue import QueueProducer
from workers.messages import Consumed, ForwardBackward, GradientsDone, Message, OptimStep, Published
from workers.transfer import Outbox

LEARNER_SECONDS = 3600.0  # bound on one forward/backward or update; a lost process is told much earlier


class LearnerClient:
    """One batch at a time: `forward_backward` (once or in chunks), then `optim_step`."""

    def __init__(self, send: Callable[[Message], None], batches: QueueProducer) -> None:
        self._send = send
        self._outbox = Outbox(batches, send, "the learner")
        self._gradients: deque[asyncio.Future[dict[str, float]]] = deque()  # of what was sent, in order
        self._update: asyncio.Future[Published] | None = None
        self._failure: Exception | None = None

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
            return await asyncio.wait_for(self._update, LEARNER_SECONDS)
        except TimeoutError:
            raise RunError(f"The learner has not answered update {batch} for {LEARNER_SECONDS:g} s.") from None

    def receive(self, message: Message) -> None:
        """A message of the learner."""
        if isinstance(message, GradientsDone | Published | Consumed):
            self._outbox.note_consumed(message.consumed)
        if isinstance(message, GradientsDone):
            if not self._gradients:
                raise RunError(f"The learner tells of gradients of batch {message.batch}, which nobody has asked for.")
            future = self._gradients.popleft()  # the learner works in order
            if not future.done():
                future.set_result(message.metrics)
        elif isinstance(message, Published) and self._update is not None and not self._update.done():
            self._update.set_result(message)

    def fail(self, error: Exception) -> None:
        """The run is over: whoever waits, or asks later, gets `error`."""
        self._failure = error
        self._outbox.fail(error)
        for future in [*self._gradients, self._update]:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # seen: nobody may be waiting for this one
        self._gradients.clear()

    def _check_alive(self) -> None:
        """It may have died while nobody waited for it, between two steps."""
        if self._failure is not None:
            raise self._failure
