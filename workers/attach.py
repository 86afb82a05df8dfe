"""How a worker opens what its start message names: blocks, ledger, queues, weight slots."""

from typing import Any

import torch

from shm.block import Block
from shm.ledger import Ledger, LedgerShape
from shm.weights import WeightSlots, open_slots
from workers.channel import WorkerChannel
from workers.messages import EndRun, Message, RunEnded, Start, Stop
from workers.model_config import ModelConfig, layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

IDLE_SECONDS = 3600.0  # how long one look for the next run's start takes; there is no bound on their number


def next_config(channel: WorkerChannel, ending: Message) -> dict[str, Any] | None:
    """The config of the next run, or None to end. `ending` (Stop, Start, EndRun) ended the one before, which must be
    closed.
    """
    message: Message | None = ending
    while not isinstance(message, Start | Stop):  # whatever else comes belongs to the run that is over
        if isinstance(message, EndRun):
            channel.send(RunEnded())
        message = channel.receive(IDLE_SECONDS)  # an idle worker dies with its supervisor
    return message.config if isinstance(message, Start) else None


class Attachments:
    """What one run of a worker has open; `close` unmaps all of it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._blocks: list[Block] = []
        self._slots: WeightSlots | None = None
        self.model = ModelConfig.from_fields(config["model"])
        self.layout = layout(self.model)
        self.ledger = self._open_ledger()

    def block(self, name: str) -> Block:
        """The block that the start message calls `name`."""
        fields = self._config[name]
        block = Block.open(fields["path"], fields["num_bytes"])
        self._blocks.append(block)
        return block

    def open_slots(self) -> WeightSlots:
        """The weight slots, as whoever made them describes them (see `shm/weights.py`)."""
        self._slots = open_slots(
            self._config["slots"], self.layout.num_elements, DTYPES[self._config["dtype"]], self._config["device"]
        )
        return self._slots

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()
        for block in self._blocks:
            block.close()

    def _open_ledger(self) -> Ledger:
        ledger = Ledger(self.block("ledger").view, LedgerShape.from_fields(self._config["ledger_shape"]))
        ledger.attach(self._config["run_id"])
        return ledger
