"""Weight slots in shared host memory. The supervisor makes the blocks, so they survive the learner."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shm.block import Block
from shm.errors import WeightsError
from shm.weight_slots import WeightSlots


class CpuWeightSlots(WeightSlots):
    """One block per slot. The blocks handed over are this object's now, and closed by it.

    Make them with `fill=WRONG_LOOKING`, that is, with NaN.
    """

    in_place = True

    def __init__(self, blocks: Sequence[Block], num_elements: int, dtype: torch.dtype) -> None:
        need = num_elements * dtype.itemsize
        for slot, block in enumerate(blocks):
            if block.num_bytes < need:
                raise WeightsError(
                    f"The block of slot {slot} has {block.num_bytes} bytes; {num_elements} elements of {dtype} "
                    f"need {need}."
                )
        self.num_slots = len(blocks)
        self.num_elements = num_elements
        self.dtype = dtype
        self._blocks = list(blocks)
        self._flats = [torch.frombuffer(block.view, dtype=dtype, count=num_elements) for block in blocks]

    def flat(self, slot: int) -> Tensor:
        self._check_slot(slot)
        if not self._flats:
            raise WeightsError("The weight slots are closed; open them again to use them.")
        return self._flats[slot]

    def description(self) -> dict[str, Any]:
        return {"blocks": [{"path": block.path, "num_bytes": block.num_bytes} for block in self._blocks]}

    def close(self) -> None:
        self._flats.clear()
        for block in self._blocks:
            block.close()
