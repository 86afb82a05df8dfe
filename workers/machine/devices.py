"""Which device the learner and the samplers get, decided without loading torch or touching CUDA.

GPUs are counted through NVML, so that bad options are refused within a second and the
supervisor never gets a CUDA context. CUDA_VISIBLE_DEVICES is honoured as the CUDA runtime does.
"""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from shm.errors import HeadwayError
from workers.machine.nvml import driver

DEVICES = ("auto", "cpu", "cuda")
SAMPLERS_PER_CORE = 4  # each is a process of its own, with torch loaded


class DeviceError(HeadwayError, ValueError):
    """The device asked for is not there, or has no room for that many samplers."""


def resolve_devices(
    device: str, samplers: int | None, *, num_gpus: int | None = None, cuda_build: bool | None = None
) -> tuple[str, int]:
    """(device, samplers) asked for -> ("cpu" or "cuda", number of samplers). Raises DeviceError.

    samplers None: one on the CPU; on CUDA one per GPU beside the learner's, or one on the only GPU. `num_gpus` and
    `cuda_build` are found out unless given.
    """
    if device not in DEVICES:
        raise DeviceError(f'device is {device!r}; it must be "auto", "cpu" or "cuda".')
    if samplers is not None and (isinstance(samplers, bool) or not isinstance(samplers, int) or samplers < 1):
        raise DeviceError(f"samplers is {samplers!r}; it counts sampler processes, so it must be at least 1.")
    if device == "cpu":
        return "cpu", _cpu_samplers(samplers)
    num_gpus = count_gpus() if num_gpus is None else num_gpus
    cuda_build = torch_has_cuda() if cuda_build is None else cuda_build
    if device == "auto" and not (num_gpus and cuda_build):
        return "cpu", _cpu_samplers(samplers)
    if num_gpus == 0:
        raise DeviceError("device is cuda, but this machine shows no NVIDIA GPU; use cpu, or auto.")
    if not cuda_build:
        raise DeviceError(
            f"device is cuda, but torch {version('torch')} is built for the CPU only; install a CUDA build, or use cpu."
        )
    most = max(1, num_gpus - 1)
    if samplers is not None and samplers > most:
        raise DeviceError(
            f"samplers is {samplers}, but {num_gpus} GPU{'s have' if num_gpus > 1 else ' has'} room for {most}: one "
            "beside the learner on a single GPU, else one on each GPU but the learner's; ask for fewer."
        )
    return "cuda", samplers or most


def _cpu_samplers(samplers: int | None) -> int:
    """One unless asked for more; far more than there are cores is a slip, and would bring the machine down."""
    most = SAMPLERS_PER_CORE * len(os.sched_getaffinity(0))
    if samplers is not None and samplers > most:
        raise DeviceError(
            f"samplers is {samplers}, but {SAMPLERS_PER_CORE} per core, {most} here, are the most that help on the "
            "CPU; ask for fewer."
        )
    return samplers or 1


def sampler_device(index: int, num_gpus: int) -> str:
    """The CUDA device of sampler `index`: the learner has cuda:0, which a sampler shares only on a single GPU."""
    return "cuda:0" if num_gpus == 1 else f"cuda:{index + 1}"


def torch_has_cuda() -> bool:
    """Whether the installed torch can use CUDA, by its version: CPU builds are marked `+cpu`."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """GPUs that a CUDA process started with this environment would see; 0 where there is no driver."""
    return visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"), _count_physical_gpus())


def visible_gpus(chosen: str | None, num_physical: int) -> int:
    """How many of `num_physical` GPUs CUDA_VISIBLE_DEVICES leaves visible."""
    return len(visible_entries(chosen, num_physical))


def visible_entries(chosen: str | None, num_physical: int) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in their order: the list ends at its first bad entry.

    A physical index, or a UUID (`GPU-…`, `MIG-…`), which counts as it stands.
    """
    if chosen is None or num_physical == 0:
        return [str(index) for index in range(num_physical)]
    seen: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        by_index = entry.isascii() and entry.isdigit() and int(entry) < num_physical
        if not by_index and not entry.startswith(("GPU-", "MIG-")):
            break
        if entry in seen:  # the runtime refuses a list that names a device twice
            return []
        seen.append(entry)
    return seen


def _count_physical_gpus() -> int:
    with driver() as nvml:
        return 0 if nvml is None else nvml.num_gpus
