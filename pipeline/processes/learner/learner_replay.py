"""A learner that begins with saved weights is brought to a later version: the updates since, sent once more."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from pipeline.errors import RunError
from pipeline.processes.learner.learner_client import LEARNER_SECONDS, send_rows
from pipeline.processes.learner.learner_history import PastUpdate
from workers.messages import Consumed, GradientsDone, Message, Replayed, ReplayStep
from workers.transfer import Outbox

NOWHERE = -1  # the slot of a version that nobody needs


class LearnerReplay:
    """Of one learner, which is ready. One update at a time, so that the history may be read as it is needed."""

    def __init__(self, outbox: Outbox, send: Callable[[Message], None]) -> None:
        self.largest_difference = 0.0  # from weights that were published before (see `Replayed`)
        self._outbox = outbox
        self._send = send
        self._replayed: asyncio.Future[Replayed] | None = None
        self._failure: Exception | None = None

    async def run(self, updates: Iterable[PastUpdate], version: int, to: int, slots_of: Mapping[int, int]) -> None:
        """From `version` to `to`, with the versions of `slots_of` in their slots. Raises what `fail` was told,
        RunError when the history has not all of the updates or the learner takes too long, or what reading it raises.
        """
        for update in updates:
            if update.from_version != version or version == to:
                raise RunError(
                    f"The update from version {version} on the way to {to} is due, but the history gives the one from "
                    f"version {update.from_version}."
                )
            await self._replay(update, slots_of.get(version + 1, NOWHERE))
            version += 1
        if version != to:
            raise RunError(f"The history ends at version {version}, but the learner must come to version {to}.")
        self._check()

    async def _replay(self, update: PastUpdate, slot: int) -> None:
        for number, rows in enumerate(update.chunks):
            await send_rows(self._outbox, self._send, update.batch, rows, zero_gradients=number == 0)
        self._check()
        self._replayed = asyncio.get_running_loop().create_future()
        self._send(
            ReplayStep(
                batch=update.batch,
                from_version=update.from_version,
                slot=slot,
                lr=update.lr,
                gradient_scale=update.gradient_scale,
            )
        )
        try:
            async with asyncio.timeout(LEARNER_SECONDS):
                answer = await self._replayed
        except TimeoutError:
            raise RunError(
                f"The learner has not replayed the update from version {update.from_version} for {LEARNER_SECONDS:g} s."
            ) from None
        self.largest_difference = max(self.largest_difference, answer.difference)

    def receive(self, message: Message) -> None:
        """A message of the learner."""
        if isinstance(message, GradientsDone | Replayed | Consumed):
            self._outbox.note_consumed(message.consumed)
        if isinstance(message, Replayed) and self._replayed is not None and not self._replayed.done():
            self._replayed.set_result(message)

    def fail(self, error: Exception) -> None:
        """The learner has died, or the run has failed."""
        if self._failure is not None:
            return
        self._failure = error
        self._outbox.fail(error)
        if self._replayed is not None and not self._replayed.done():
            self._replayed.set_exception(error)
            self._replayed.exception()  # seen: nobody may be waiting for it yet

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
