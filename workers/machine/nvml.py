"""NVML, the NVIDIA driver's own library, through ctypes: it loads in milliseconds and makes no CUDA context. A leaf."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple


class Driver(NamedTuple):
    """An open NVML. num_gpus: physical ones, which it numbers by PCI bus."""

    library: ctypes.CDLL
    num_gpus: int


@contextlib.contextmanager
def driver() -> Iterator[Driver | None]:
    """NVML while it is open; None where there is no driver, or it does not answer."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        library = None
    if library is None or library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        count = ctypes.c_uint(0)
        answers = library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        yield Driver(library, count.value) if answers else None
    finally:
        library.nvmlShutdown()
