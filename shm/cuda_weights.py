"""Weight slots in CUDA memory, seen by other processes through IPC handles.

The learner allocates each slot with cudaMalloc itself, not through torch: torch's allocator may use expandable
segments, which have no classic IPC handle, and it exports whole segments with whatever else lies in them. Sizes are
multiples of 2 MiB, since smaller allocations share a driver's block, and the handle would show all of it. A handle
travels as plain fields with the UUID of its device, as device numbers differ between processes.

The mappings die with the learner. Samplers close theirs before it exits; if it is killed, they are restarted too.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shm.errors import WeightsError
from shm.weight_slots import DTYPES, WeightSlots

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_GRANULE = 2 << 20
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_TYPESTRINGS = {4: "<i4", 2: "<i2"}  # __cuda_array_interface__ knows no bfloat16: map integers, then view
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class SlotHandle:
    """One slot on its way to another process. Raises WeightsError when a field can't be right."""

    handle: bytes
    device_uuid: str
    num_elements: int
    dtype: str

    def __post_init__(self) -> None:
        if type(self.handle) is not bytes or len(self.handle) != _HANDLE_BYTES:
            raise WeightsError(f"A CUDA IPC handle is {self.handle!r}; it must be {_HANDLE_BYTES} bytes.")
        if type(self.device_uuid) is not str or not _UUID.fullmatch(self.device_uuid):
            raise WeightsError(f"A CUDA device's UUID is {self.device_uuid!r}; it must look like 1b4e28ba-2fa1-….")
        if type(self.num_elements) is not int or self.num_elements < 1:
            raise WeightsError(f"A CUDA slot has {self.num_elements!r} elements; give an integer >= 1.")
        if self.dtype not in DTYPES:
            raise WeightsError(f"A CUDA slot has dtype {self.dtype!r}; it must be one of {sorted(DTYPES)}.")

    def to_fields(self) -> dict[str, Any]:
        """Plain values for a message."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "SlotHandle":
        """Inverse of `to_fields`; WeightsError when a field is missing, unknown or wrong."""
        try:
            return cls(**fields)
        except TypeError as error:
            raise WeightsError(f"Not a CUDA slot's handle: {fields!r} ({error}).") from error


class _DeviceMemory:
    """A device address that torch can view: `torch.as_tensor` reads `__cuda_array_interface__` and copies nothing."""

    def __init__(self, address: int, num_elements: int, element_size: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (num_elements,),
            "typestr": _TYPESTRINGS[element_size],
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


class CudaWeightSlots(WeightSlots):
    """Made with `allocate` (the learner) or `open` (a sampler), which also say who ends the memory."""

    def __init__(
        self, addresses: Sequence[int], num_elements: int, dtype: torch.dtype, device: torch.device, is_owner: bool
    ) -> None:
        self.num_slots = len(addresses)
        self.num_elements = num_elements
        self.dtype = dtype
        self.device = device  # where the slots are
        self.in_place = True
        self._is_owner = is_owner
        self._addresses = list(addresses)
        self._flats = [
            torch.as_tensor(_DeviceMemory(address, num_elements, dtype.itemsize), device=device).view(dtype)
            for address in addresses
        ]

    @classmethod
    def allocate(
        cls, num_slots: int, num_elements: int, dtype: torch.dtype, device: str | torch.device
    ) -> "CudaWeightSlots":
        """New slots on `device`, filled with NaN. WeightsError when there is no CUDA or not enough device memory."""
        device = _cuda_device(device)
        num_bytes = -(-num_elements * dtype.itemsize // _GRANULE) * _GRANULE
        addresses: list[int] = []
        with torch.cuda.device(device):
            try:
                for _ in range(num_slots):
                    address = ctypes.c_void_p()
                    _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
                    addresses.append(address.value)
            except WeightsError as error:
                for address in addresses:
                    _call("cudaFree", ctypes.c_void_p(address))
                raise WeightsError(
                    f"{num_slots} weight slots of {num_bytes} bytes do not fit on {device} ({error}); use fewer "
                    "slots, a smaller model, or free device memory."
                ) from error
            slots = cls(addresses, num_elements, dtype, device, is_owner=True)
            for flat in slots._flats:
                flat.fill_(torch.nan)
            torch.cuda.current_stream().synchronize()
        return slots

    @classmethod
    def open(cls, handles: Sequence[dict[str, Any]], device: str | torch.device) -> "CudaWeightSlots":
        """Map another process's slots. `device`: where this process computes; `in_place` tells whether they are
        there.

        The learner's device must be visible here too. Raises WeightsError when it is not, or a handle is no longer
        good.
        """
        parsed = [SlotHandle.from_fields(fields) for fields in handles]
        if len({(slot.device_uuid, slot.num_elements, slot.dtype) for slot in parsed}) != 1:
            raise WeightsError(
                f"{len(parsed)} CUDA slots differ in device, size or dtype (or there are none): {parsed}."
            )
        here = _cuda_device(device)
        home = _device_with_uuid(parsed[0].device_uuid)
        addresses: list[int] = []
        with torch.cuda.device(home):
            try:
                for slot in parsed:
                    address = ctypes.c_void_p()
                    handle = _IpcHandle.from_buffer_copy(slot.handle)
                    _call("cudaIpcOpenMemHandle", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
                    addresses.append(address.value)
            except WeightsError:
                for address in addresses:
                    _call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))
                raise
        slots = cls(addresses, parsed[0].num_elements, DTYPES[parsed[0].dtype], home, is_owner=False)
        slots.in_place = here == home
        return slots

    def flat(self, slot: int) -> Tensor:
        self._check_slot(slot)
        if not self._flats:
            raise WeightsError("The weight slots are closed; open them again to use them.")
        return self._flats[slot]

    def handles(self) -> list[dict[str, Any]]:
        """For each slot the plain values that `open` takes in another process (never in this one: CUDA forbids it)."""
        if not self._is_owner:
            raise WeightsError("Only the process that allocated CUDA slots can export them.")
        dtype = str(self.dtype).removeprefix("torch.")
        exported = []
        with torch.cuda.device(self.device):
            for address in self._addresses:
                handle = _IpcHandle()
                _call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
                slot = SlotHandle(bytes(handle), _uuid(self.device.index), self.num_elements, dtype)
                exported.append(slot.to_fields())
        return exported

    def description(self) -> dict[str, Any]:
        return {"handles": self.handles()}

    def close(self) -> None:
        self._flats.clear()
        addresses, self._addresses = self._addresses, []
        if not addresses:
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # no kernel may still read them
            for address in addresses:
                _call("cudaFree" if self._is_owner else "cudaIpcCloseMemHandle", ctypes.c_void_p(address))


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t; passed to cudaIpcOpenMemHandle by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded; another copy would not share its state."""
    torch.cuda.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart"):
            library = ctypes.CDLL(path)
            library.cudaGetErrorString.restype = ctypes.c_char_p
            return library
    raise WeightsError("torch has loaded no libcudart; install a torch wheel that links the CUDA runtime dynamically.")


def _call(name: str, *arguments: Any) -> None:
    library = _runtime()
    if status := getattr(library, name)(*arguments):
        why = library.cudaGetErrorString(status).decode()
        library.cudaGetLastError()  # forget it, else torch raises it at its next, innocent call
        raise WeightsError(f"{name} failed with CUDA error {status}: {why}.")


def _cuda_device(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise WeightsError(
            f"CUDA weight slots were asked for on {device}; that needs an NVIDIA GPU that torch can use."
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid).lower().removeprefix("gpu-")


def _device_with_uuid(uuid: str) -> torch.device:
    found = [_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in found:
        raise WeightsError(
            f"The learner's GPU {uuid} is not visible here ({len(found)} are: {found}); "
            "make all GPUs visible to all workers."
        )
    return torch.device("cuda", found.index(uuid))
