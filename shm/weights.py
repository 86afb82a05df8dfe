"""Weight slots from a description in plain values: the one door to both backings, host memory and CUDA memory."""

from typing import Any

import torch

from shm.block import Block
from shm.cpu_weights import CpuWeightSlots
from shm.cuda_weights import CudaWeightSlots
from shm.errors import WeightsError
from shm.weight_slots import DTYPES, WeightSlots

__all__ = ["DTYPES", "CpuWeightSlots", "CudaWeightSlots", "WeightSlots", "open_slots"]


def open_slots(
    description: dict[str, Any], num_elements: int, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> WeightSlots:
    """Make or open the slots of a model of `num_elements`. `description` has one key:

    blocks: [{"path", "num_bytes"}, …], one per slot, made by the supervisor: slots in shared host memory.
    num_slots: n slots to allocate on the CUDA `device`: for the learner, before it takes any other memory.
    handles: what a learner's `description()` gave: its CUDA slots, for a sampler that computes on `device`.

    WeightSlots.description() is such a description. Raises WeightsError or BlockError.
    """
    device = torch.device(device)
    if set(description) == {"blocks"}:
        blocks: list[Block] = []
        try:
            for fields in description["blocks"]:
                blocks.append(Block.open(fields["path"], fields["num_bytes"]))
            return CpuWeightSlots(blocks, num_elements, dtype)
        except BaseException:
            for block in blocks:
                block.close()
            raise
    if set(description) == {"num_slots"}:
        return CudaWeightSlots.allocate(description["num_slots"], num_elements, dtype, device)
    if set(description) == {"handles"}:
        slots = CudaWeightSlots.open(description["handles"], device)
        if (slots.num_elements, slots.dtype) != (num_elements, dtype):
            slots.close()
            raise WeightsError(
                f"The learner's slots hold {slots.num_elements} elements of {slots.dtype}; this model needs "
                f"{num_elements} of {dtype}. Give both processes the same model and dtype."
            )
        return slots
    raise WeightsError(
        f"A description of weight slots has the keys {sorted(description)}; it has exactly one of blocks, "
        "num_slots, handles."
    )
