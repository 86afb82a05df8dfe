"""The frame of sampler and learner: run after run, each from opening its memory to the message that ends it."""

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from shm.ledger import Activity, WorkerRow
from workers.attach import Attachments
from workers.channel import WorkerChannel
from workers.errors import MessageError
from workers.messages import EndRun, Message, Ready, RunEnded, Start, Stop

HEARTBEAT_SECONDS = 0.25  # how long an idle worker listens before it beats again
IDLE_SECONDS = 3600.0  # how long one look for the next run's start takes; there is no bound on their number


class Worker(Protocol):
    """One run of a worker: made when its memory is open."""

    def begin(self) -> dict[str, Any]:
        """What is to be done before the first message; returns the detail of Ready."""

    def loop(self) -> Message:
        """Serve; returns the message that ends the run (`ends_run`)."""


MakeWorker = Callable[[WorkerChannel, dict[str, Any], Attachments], Worker]


def serve_run(channel: WorkerChannel, config: dict[str, Any], make: MakeWorker) -> dict[str, Any] | None:
    """One run; returns the next one's config, or None when told to stop."""
    torch.set_num_threads(config["threads"])
    ending = _serve(channel, config, make)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what an idle worker keeps, the next run's estimate would miss
    return _next_config(channel, ending)


def introduce(channel: WorkerChannel, config: dict[str, Any], attached: Attachments) -> WorkerRow:
    """This process's row of the ledger, telling who it is."""
    row = attached.ledger.worker(config["worker"])
    row.introduce(os.getpid(), channel.incarnation)
    row.beat(Activity.STARTING)
    return row


def ends_run(message: Message) -> bool:
    return isinstance(message, Stop | Start | EndRun)


def mistaken(role: str, message: Message, *takes: type[Message]) -> MessageError:
    """What to raise over a message that its role does not take: left alone, who sent it would wait for an answer."""
    kinds = ", ".join(kind.__name__ for kind in takes)
    return MessageError(
        f"The {role} got {type(message).__name__}. It takes {kinds}, EndRun, Start and Stop. "
        "This is a mistake of the supervisor."
    )


def _serve(channel: WorkerChannel, config: dict[str, Any], make: MakeWorker) -> Message:
    """To the message that ends the run. A function of its own: with its variables goes what maps the run's memory."""
    attached = Attachments(config)
    try:
        worker = make(channel, config, attached)
        channel.send(Ready(detail=worker.begin()))
        return worker.loop()
    finally:
        attached.close()


def _next_config(channel: WorkerChannel, ending: Message) -> dict[str, Any] | None:
    """The config of the next run, or None to end. The one that `ending` has ended must be closed."""
    message: Message | None = ending
    while not isinstance(message, Start | Stop):  # whatever else comes belongs to the run that is over
        if isinstance(message, EndRun):
            channel.send(RunEnded())
        message = channel.receive(IDLE_SECONDS)  # an idle worker dies with its supervisor
    return message.config if isinstance(message, Start) else None
