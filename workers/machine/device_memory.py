"""How much memory the host and the GPUs have, without torch, and without a CUDA context."""

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

from shm.block import available_bytes
from workers.machine.devices import visible_entries
from workers.machine.nvml import driver


class DeviceMemory(NamedTuple):
    """Bytes: free now for a new process, and in all."""

    free: int
    total: int


def host_memory() -> DeviceMemory:
    """free: within the limits of this process's control groups, too."""
    return DeviceMemory(available_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def gpu_memory(index: int, environment: Mapping[str, str] = os.environ) -> DeviceMemory | None:
    """Of the GPU that a CUDA process started with this environment calls `cuda:index`; None where NVML can't tell.

    As in `visible_gpus` physical GPUs are counted as NVML does, by PCI bus; CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID
    or where all are of one kind.
    """
    with driver() as nvml:
        if nvml is None:
            return None
        entries = visible_entries(environment.get("CUDA_VISIBLE_DEVICES"), nvml.num_gpus)
        return _memory_of(nvml.library, entries[index]) if index < len(entries) else None


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _memory_of(nvml: ctypes.CDLL, entry: str) -> DeviceMemory | None:
    """entry: a physical index, or a UUID."""
    handle, found = ctypes.c_void_p(), _Memory()
    if entry.isdigit():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(entry)), ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(entry.encode(), ctypes.byref(handle))
    if status != 0 or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)) != 0:
        return None
    return DeviceMemory(found.free, found.total)
