"""The memory of the host and of GPUs, these through a driver's library that the test plays."""

import ctypes

import pytest

from workers.machine.device_memory import DeviceMemory, gpu_memory, host_memory

UUIDS = {b"GPU-aa": 0, b"GPU-bb": 1}


class Nvml:
    """Two GPUs: of number n, (n + 1) * 1000 bytes in all, half of them free."""

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit_v2(self):
        self.open += 1
        return 0

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1  # a null handle is none
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        if uuid not in UUIDS:
            return 6
        handle._obj.value = UUIDS[uuid] + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total, memory._obj.free = handle.value * 1000, handle.value * 500
        return 0


@pytest.fixture
def nvml(monkeypatch):
    made = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    yield made
    assert made.open == 0


@pytest.mark.parametrize(
    ("chosen", "index", "total"),
    [
        (None, 0, 1000),
        (None, 1, 2000),
        (None, 2, None),
        ("1", 0, 2000),
        ("1,0", 1, 1000),
        ("GPU-bb", 0, 2000),
        ("GPU-cc", 0, None),
        ("", 0, None),
    ],
)
def test_a_gpu_is_the_one_that_cuda_calls_so(nvml, chosen, index, total):
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    wanted = None if total is None else DeviceMemory(free=total // 2, total=total)
    assert gpu_memory(index, environment) == wanted


def test_without_a_driver_nobody_can_tell(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert gpu_memory(0, {}) is None


def test_the_host_has_what_is_free_of_what_it_has():
    found = host_memory()
    assert 0 < found.free < found.total
