"""The supervisor's end of the learner: batches out through its queue, gradients and updates back.

What a batch consists of is kept until its update is published: a learner that takes a dead one's place has none of the
gradients, so it is sent all of it again. Who waits for an answer just waits a little longer.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.batches.rows import Rows
from pipeline.errors import RunError
from workers.errors import CheckpointError, WorkerDied
from workers.messages import Consumed, ForwardBackward, GradientsDone, Message, OptimStep, Published, Save, Saved
from workers.transfer import Outbox

LEARNER_SECONDS = 3600.0  # bound on one forward/backward or update; a lost process is told much earlier
SAVE_SECONDS = 600.0  # bound on an ended run's update, and on saving its weights, beside what a slow disk needs
SLOW_DISK_BYTES_PER_SECOND = 20e6


@dataclass(slots=True)
class _Chunk:
    """Rows of the batch; the future is done with the learner's metrics when their gradients are."""

    batch: int
    rows: Rows
    zero_gradients: bool
    future: asyncio.Future[dict[str, float]]


@dataclass(slots=True)
class _Asked:
    """A message that waits for its turn, or is sent."""

    message: OptimStep | Save
    is_sent: bool = False


class LearnerClient:
    """One batch at a time: `forward_backward` (once or in chunks), then `optim_step`. `connect` gives it a learner to
    speak to, `disconnect` takes that away; what is asked meanwhile waits.

    `published` is the latest version that a learner has answered for, and its slot; None before the first.
    """

    def __init__(self) -> None:
        self.published: tuple[int, int] | None = None
        self._outbox: Outbox | None = None
        self._send: Callable[[Message], None] | None = None
        self._turn = asyncio.Lock()  # who sends: pieces of two payloads must not mix
        self._chunks: list[_Chunk] = []  # of the batch, in order
        self._num_sent = self._num_answered = 0  # of them, by and to the learner that there is now
        self._step: _Asked | None = None
        self._update: asyncio.Future[Published] | None = None
        self._answer: asyncio.Future[Published] | None = None  # to it: comes also when nobody waits for it any more
        self._save: _Asked | None = None
        self._saving: asyncio.Future[Saved] | None = None
        self._failure: Exception | None = None
        self._lost = False

    # --- a learner, and its end ----------------------------------------------------------------------------------

    async def connect(self, outbox: Outbox, send: Callable[[Message], None]) -> None:
        """Speak to a learner that is at the version before the batch's update, and send it what was asked for."""
        self._outbox, self._send = outbox, send
        self._num_sent = self._num_answered = 0
        for asked in (self._step, self._save):
            if asked is not None:
                asked.is_sent = False
        await self._send_due()

    def disconnect(self, error: Exception) -> None:
        """It has died of `error`, and another one will take its place."""
        outbox, self._outbox, self._send = self._outbox, None, None
        if outbox is not None:
            outbox.fail(error)

    def fail(self, error: Exception) -> None:
        """The run is over: whoever waits, or asks later, gets `error`. The learner, if there is one, may be asked to
        save.
        """
        self._failure = error
        for future in [*(chunk.future for chunk in self._chunks), self._update]:
            _tell(future, error)
        self._chunks.clear()
        if self._step is not None and not self._step.is_sent:  # it never will be: the gradients are not whole
            self._step = self._answer = None
        if self._outbox is None:
            self.lose(error)
        else:
            self._outbox.fail(error)

    @property
    def is_away(self) -> bool:
        """Whether there is none just now: what is asked waits."""
        return self._outbox is None

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be had of a learner any more, not even in a run that has failed."""
        return self._lost

    def lose(self, error: Exception) -> None:
        """It has ended for good, or can't be heard: who waits for what it does in a failed run gets `error`, too."""
        if self._lost:
            return
        self._lost = True
        self.disconnect(error)
        self.fail(error)
        for future in (self._answer, self._saving):
            _tell(future, error)

    def state(self) -> dict[str, Any]:
        """For a report: what it was asked and has not answered, and the room in its ring."""
        found: dict[str, Any] = {"connected": self._outbox is not None, "chunks": len(self._chunks)}
        found |= {"chunks_sent": self._num_sent, "chunks_answered": self._num_answered}
        found |= {"update": self._step is not None, "saving": self._save is not None}
        return found | ({} if self._outbox is None else {"batch_ring_free_bytes": self._outbox.room()})

    # --- what is asked of it -------------------------------------------------------------------------------------

    async def forward_backward(
        self, batch: int, rows: Rows, *, zero_gradients: bool
    ) -> asyncio.Future[dict[str, float]]:
        """Send rows, the whole batch or one chunk of it; the future is done, with the learner's metrics, when their
        gradients are.
        """
        self._check_alive()
        if zero_gradients:
            self._chunks.clear()
            self._num_sent = self._num_answered = 0
        future = asyncio.get_running_loop().create_future()
        self._chunks.append(_Chunk(batch, rows, zero_gradients, future))
        await self._send_due()
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
        self._step = _Asked(
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
            async with asyncio.timeout(LEARNER_SECONDS):
                await self._send_due()
                published = await self._update
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
            async with asyncio.timeout(SAVE_SECONDS):
                return await self._answer
        except TimeoutError:
            raise RunError(f"The learner has not answered its update for {SAVE_SECONDS:g} s.") from None

    async def save(self, version: int, path: str, optimizer_path: str, num_bytes: int) -> tuple[int, int]:
        """Have it write `version`'s weights and the optimizer's state as safetensors files, of about `num_bytes`
        together; returns the checksums of both. It may be asked after the run has failed, too: what it can't do is be
        dead. Raises CheckpointError when it could not write them.
        """
        self._saving = asyncio.get_running_loop().create_future()
        self._save = _Asked(Save(version=version, path=path, optimizer_path=optimizer_path))
        seconds = SAVE_SECONDS + num_bytes / SLOW_DISK_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(seconds):
                await self._send_due()
                saved = await self._saving
        except TimeoutError:
            raise RunError(f"The learner has not saved version {version} within {seconds:.0f} s.") from None
        finally:
            self._save = None
        if saved.error is not None:
            raise CheckpointError(saved.error)
        weights, optimizer = saved.checksums
        return weights, optimizer

    async def _send_due(self) -> None:
        """All that the learner has not been sent yet, in order. Without one, and when it dies meanwhile, that waits for
        the next one. Raises what the run failed with.
        """
        async with self._turn:
            outbox = self._outbox
            try:
                while outbox is not None and self._num_sent < len(self._chunks):
                    chunk = self._chunks[self._num_sent]
                    await send_rows(outbox, self._send, chunk.batch, chunk.rows, zero_gradients=chunk.zero_gradients)
                    self._num_sent += 1
            except WorkerDied:
                if self._failure is not None or self._outbox is outbox:
                    raise
                return
            for asked in (self._step, self._save):
                if asked is not None and not asked.is_sent and self._send is not None:
                    self._send(asked.message)
                    asked.is_sent = True

    # --- what it answers -----------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """A message of the learner."""
        if self._outbox is None:
            return
        if isinstance(message, GradientsDone | Published | Saved | Consumed):
            self._outbox.note_consumed(message.consumed)
        if isinstance(message, GradientsDone):
            if self._failure is not None:  # who asked for them has been told that the run is over
                return
            if self._num_answered >= self._num_sent:
                raise RunError(f"The learner tells of gradients of batch {message.batch}, which nobody has asked for.")
            future = self._chunks[self._num_answered].future  # the learner works in order
            self._num_answered += 1
            if not future.done():  # a learner before may have told of them
                future.set_result(message.metrics)
        elif isinstance(message, Published):
            self._note_published(message)
        elif isinstance(message, Saved) and self._saving is not None and not self._saving.done():
            self._saving.set_result(message)

    def _note_published(self, message: Published) -> None:
        if self._step is None or self._step.message.to_version != message.version:
            raise RunError(f"The learner tells of version {message.version}, which nobody has asked for.")
        self.published = message.version, message.slot
        self._step = None
        self._chunks.clear()  # a learner that comes after gets them from the history
        self._num_sent = self._num_answered = 0
        for future in (self._update, self._answer):
            if future is not None and not future.done():
                future.set_result(message)

    def _check_alive(self) -> None:
        """It may have died while nobody waited for it, between two steps."""
        if self._failure is not None:
            raise self._failure


async def send_rows(
    outbox: Outbox, send: Callable[[Message], None], batch: int, rows: Rows, *, zero_gradients: bool
) -> None:
    """Ask for the gradients of rows: their bytes through the queue, then the message. Raises what `Outbox.put` does."""
    parts = rows.payload()
    position = await outbox.put(*parts)
    send(
        ForwardBackward(
            batch=batch,
            num_rows=rows.num_rows,
            num_tokens=rows.num_tokens,
            position=position,
            length=sum(part.nbytes for part in parts),
            zero_gradients=zero_gradients,
        )
    )


def _tell(future: asyncio.Future | None, error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # seen: nobody may be waiting for this one
