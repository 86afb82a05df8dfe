"""Sizes that follow from the model and the machine: how much goes through the model at once, how large KV caches are.

Pure: the memory that is there comes in as numbers.
"""

from collections.abc import Mapping
from dataclasses import replace

from pipeline.memory.activations import (
    CPU_BUDGET_BYTES,
    CUDA_BUDGET_SHARE,
    micro_batch_tokens,
    sampler_batch_tokens,
)
from pipeline.memory.estimate import (
    GIB,
    HOST,
    WINDOW_SHARE,
    kv_token_bytes,
    learner_pass_cost,
    run_parts,
    sampler_pass_cost,
    totals,
)
from pipeline.run_spec import RunSpec
from workers.machine.device_memory import DeviceMemory

CPU_KV_BYTES = 1 << 30  # most that a sampler on the CPU spends on its KV cache unless told otherwise
CUDA_KV_SHARE = 0.8  # of what all else leaves of a GPU, for KV cache and windows
UNKNOWN_GPU_BYTES = 8 * GIB  # taken for granted where the driver does not tell
LEAST_KV_TOKENS = 1024

Memory = Mapping[str, DeviceMemory | None]


def fit_passes(spec: RunSpec, memory: Memory) -> RunSpec:
    """`spec` with passes of learner and samplers that keep their activations within a budget, but for rows that are
    longer than that alone.
    """
    learner = _activation_budget(spec.learner_device, memory)
    sampler = min(_activation_budget(device, memory) for device in spec.sampler_devices)
    return replace(
        spec,
        micro_batch_tokens=micro_batch_tokens(learner_pass_cost(spec), learner),
        max_batch_tokens=sampler_batch_tokens(sampler_pass_cost(spec), sampler, spec.concurrency),
    )


def fit_kv_cache(spec: RunSpec, memory: Memory, kv_gib: float | None) -> RunSpec:
    """`spec`, whose kv_tokens are all that can run at once, with the KV caches that it gets: kv_gib each, if given."""
    token_bytes = kv_token_bytes(spec.model, spec.dtype)
    if kv_gib is not None:
        return replace(spec, kv_tokens=max(1, int(kv_gib * GIB) // token_bytes))
    if spec.sampler_devices[0] == HOST:
        room = CPU_KV_BYTES
    else:
        others = totals(run_parts(replace(spec, kv_tokens=0)))
        left = min(_free(device, memory) - others[device] for device in spec.sampler_devices)
        room = int(CUDA_KV_SHARE * left / (1 + WINDOW_SHARE))
    return replace(spec, kv_tokens=max(LEAST_KV_TOKENS, min(spec.kv_tokens, room // token_bytes)))


def _activation_budget(device: str, memory: Memory) -> int:
    if device == HOST:
        return CPU_BUDGET_BYTES
    found = memory.get(device)
    return int(CUDA_BUDGET_SHARE * (UNKNOWN_GPU_BYTES if found is None else found.total))


def _free(device: str, memory: Memory) -> int:
    found = memory.get(device)
    return UNKNOWN_GPU_BYTES if found is None else found.free
