"""Weight slots: copies of a policy's weights that several processes see, each one flat buffer. The common part.

A slot has the element offsets of the learner's master weights (`shm/layout.py`) and a dtype of its own, so publishing
is one casting copy. Which version a slot holds stands in the ledger, and a lease there keeps it from being rewritten:
a slot itself knows neither. Fresh slots hold NaN.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from shm.errors import WeightsError
from shm.layout import ELEMENT_BYTES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENT_BYTES}  # that a slot may have
_BITS = {2: torch.int16, 4: torch.int32}  # by element size: the same bytes as whole numbers
_STRIP_ELEMENTS = 1 << 22  # a checksum works in strips: int64 copies of them, not of the model
_ODD = -7046029254386353131  # 2**64 divided by the golden ratio, as int64: spreads neighbouring places


class WeightSlots(ABC):
    """`num_slots` flat buffers of `num_elements` in `dtype`. The learner publishes, samplers read under a lease.

    in_place: whether this process can compute on the slots where they are (else it copies `flat` to its own device).
    """

    num_slots: int
    num_elements: int
    dtype: torch.dtype
    in_place: bool

    @abstractmethod
    def flat(self, slot: int) -> Tensor:
        """The slot itself, [num_elements] of `dtype`: a view, not a copy; valid until `close`."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Plain values from which `open_slots` makes the same slots in another process."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory up; again and again is fine. No tensor from `flat` may be used afterwards."""

    def publish(self, slot: int, source_flat: Tensor) -> int:
        """Copy (and cast) `source_flat` [num_elements] into a slot; return the bytes written.

        Blocks until the copy is done, on CUDA too: afterwards the ledger may say READY. The caller has checked that
        nobody leases the slot. Raises WeightsError when the shapes differ.
        """
        target = self.flat(slot)
        if source_flat.shape != target.shape:
            raise WeightsError(
                f"Weights of shape {tuple(source_flat.shape)} can't be published into a slot of {self.num_elements} "
                "elements; both must have the model's layout."
            )
        with torch.no_grad():
            target.copy_(source_flat)
        if target.is_cuda:
            torch.cuda.current_stream(target.device).synchronize()
        return target.numel() * target.element_size()

    def difference(self, slot: int, source_flat: Tensor) -> float:
        """The largest distance of an element of the slot to what `publish` would write there; inf if one is NaN."""
        largest = 0.0
        flat = self.flat(slot)
        for start in range(0, self.num_elements, _STRIP_ELEMENTS):
            strip = flat[start : start + _STRIP_ELEMENTS]
            source = source_flat.detach()[start : start + _STRIP_ELEMENTS].to(self.dtype)
            if not torch.equal(strip, source):
                distance = float((strip.float() - source.float()).abs().max())
                largest = max(largest, distance if distance == distance else float("inf"))
        return largest

    def checksum(self, slot: int) -> int:
        """A number in [0, 2**63) that any mixture of two versions changes: for tests that look for torn weights.

        Every element's bits times an odd number made from its place, summed modulo 2**63; exact, the same on CPU and
        CUDA, in any order of summation. Takes several times a publication.
        """
        flat = self.flat(slot)
        bits = flat.view(_BITS[flat.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, self.num_elements, _STRIP_ELEMENTS):
            strip = bits[start : start + _STRIP_ELEMENTS].to(torch.int64)
            places = torch.arange(start, start + len(strip), device=flat.device)
            total += (strip * (places * _ODD | 1)).sum()
        return int(total) & (2**63 - 1)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise WeightsError(f"There is no weight slot {slot}; there are {self.num_slots}.")
