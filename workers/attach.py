"""How a worker opens what its start message names: blocks, ledger, queues, weight slots."""

from typing import Any

from shm.block import Block
from shm.ledger import Ledger, LedgerShape
from shm.weights import DTYPES, WeightSlots, open_slots
from workers.model_config import ModelConfig, layout


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
