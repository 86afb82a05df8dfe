"""A learner that dies at a named point of its work; as a worker's module, by signals that a plan beside its log names.

The plan, `deaths.json`, lists [point, batch, whether in a replay, signal]; an empty file `died-<n>` tells that death n
of it has come.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shm.ledger import State
from workers.attach import Attachments
from workers.channel import WorkerChannel
from workers.learner import Learner
from workers.messages import GradientsDone, Message, Published, Replayed
from workers.serving import serve_run

# Where it may die in the course of one update, in order; in a replay, too, but for the slots that are filled already.
POINTS = [
    "rows_arrived",
    "in_forward",
    "gradients_made",
    "gradients_told",
    "step_arrived",
    "stepped",
    "slot_writing",
    "slot_ready",
    "version_written",
    "published",
]
# Beside "save_arrived" and "saving", those before and after an answer.
_AROUND = {
    GradientsDone: ("gradients_made", "gradients_told"),
    Published: ("version_written", "published"),
    Replayed: ("version_written", "published"),
}

# reach(point, batch, whether in a replay) ends the process, or raises.
Reach = Callable[[str, int, bool], None]


class Dying(Learner):
    """Calls `reach` at each point."""

    def __init__(self, channel: Any, config: dict[str, Any], attached: Attachments, reach: Reach) -> None:
        self._batch, self._replays = 0, False
        self._die = reach
        super().__init__(_Telling(channel, self._reach), config, attached)
        self._ledger.write_slot = self._reaching(self._ledger.write_slot)

    def handle(self, message: Message) -> None:
        self._batch = getattr(message, "batch", self._batch)
        self._replays = self._version < self._replay_to
        super().handle(message)

    def _reach(self, point: str) -> None:
        self._die(point, self._batch, self._replays)

    def _forward_backward(self, message):
        self._reach("rows_arrived")
        forward_backward = self._trainee.forward_backward
        self._trainee.forward_backward = lambda rows, beat, **options: forward_backward(
            rows, beat=lambda: self._reach("in_forward"), **options
        )
        try:
            super()._forward_backward(message)
        finally:
            self._trainee.forward_backward = forward_backward

    def _step(self, message):
        self._reach("step_arrived")
        metrics = super()._step(message)
        self._reach("stepped")
        return metrics

    def _reaching(self, write_slot):
        def write(slot, version, state, checksum=0):
            write_slot(slot, version, state, checksum)
            self._reach("slot_writing" if state == State.WRITING else "slot_ready")

        return write

    def _save(self, message):
        self._reach("save_arrived")
        super()._save(message)

    def _write(self, message):
        beat = self._row.beat
        self._row.beat = lambda activity: self._reach("saving")
        try:
            return super()._write(message)
        finally:
            self._row.beat = beat


class _Telling:
    """The channel, with a point before and after each answer."""

    def __init__(self, channel: Any, reach: Callable[[str], None]) -> None:
        self.incarnation = channel.incarnation
        self.receive = channel.receive
        self._send = channel.send
        self._reach = reach

    def send(self, message: Message) -> None:
        before, after = _AROUND.get(type(message), ("answering", "answered"))
        self._reach(before)
        self._send(message)
        self._reach(after)


def serve(channel: WorkerChannel, config: dict[str, Any]) -> dict[str, Any] | None:
    """As the module of a worker."""
    folder = Path(config["log_path"]).parent
    plan = json.loads((folder / "deaths.json").read_text())

    def reach(point: str, batch: int, replays: bool) -> None:
        number = len(list(folder.glob("died-*")))
        if number < len(plan) and plan[number][:3] == [point, batch, replays]:
            (folder / f"died-{number}").touch()
            os.kill(os.getpid(), plan[number][3])

    return serve_run(channel, config, lambda *arguments: Dying(*arguments, reach))
