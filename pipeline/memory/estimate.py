"""How much memory a run needs on each device, and the refusal when that is more than is there. Pure: plain numbers.

An estimate from above: caches and contexts count as full, rows as long as they may get. What is needed is compared
before any process starts and any block is allocated, so that nobody waits for a load that ends in the kernel's
out-of-memory killer.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline.errors import ConfigError
from pipeline.memory.activations import PassCost, learner_cost, sampler_cost
from pipeline.processes.worker.run_blocks import BATCH_QUEUE_BYTES, REQUEST_QUEUE_BYTES, reply_queue_bytes
from pipeline.run_spec import RunSpec
from shm.layout import ELEMENT_BYTES
from workers.model_config import ModelConfig, layout

HOST = "cpu"
GIB = 1 << 30
# Measured: the supervisor with an environment process, a worker with torch loaded on the CPU. Taken for granted: the
# host's and the device's part of a CUDA context.
SUPERVISOR_BYTES = 200 << 20
WORKER_BYTES = 300 << 20
CUDA_WORKER_BYTES = 1 << 30
CUDA_CONTEXT_BYTES = 600 << 20
KV_ROW_BYTES = 32  # of the tables of a KV row: its token, log-prob, place, holders
WINDOW_SHARE = 1.25  # lanes of running sequences beside the pool, which grow by a quarter ahead of need
TRAJECTORY_BYTES = 4 << 10  # of one that has hardly begun
TRAJECTORY_TOKEN_BYTES = 24  # token, log-prob and version, as the trajectory has them and again in a batch
_F32 = 4


class Part(NamedTuple):
    """One thing that takes memory, on the device where it does."""

    device: str
    what: str
    num_bytes: int
    lower: str = ""  # the options that make it smaller


def run_parts(spec: RunSpec) -> list[Part]:
    """All that a run of `spec` takes."""
    return [*_learner_parts(spec), *_slot_parts(spec), *_supervisor_parts(spec), *_sampler_parts(spec)]


def _learner_parts(spec: RunSpec) -> list[Part]:
    device, num = spec.learner_device, layout(spec.model).num_elements
    element = ELEMENT_BYTES[spec.dtype]
    parts = [*_process(device, "the learner's process")]
    parts.append(Part(device, "the learner's float32 weights", _F32 * num))
    if device != HOST:
        parts.append(Part(HOST, "the weights while they are loaded", _largest_tensor(spec.model) * _F32))
    if not spec.trains:
        return parts
    parts.append(Part(device, "gradients", _F32 * num))
    parts.append(Part(device, "Adam's two averages", 2 * _F32 * num))
    if element < _F32:
        parts.append(Part(device, f"{spec.dtype} copies of weights and gradients", 2 * element * num))
    if spec.kl_coefficient > 0:
        parts.append(Part(device, "the KL reference", element * num, "kl_coefficient to 0"))
    parts.append(Part(device, "activations of the learner", _learner_activations(spec), "max_context_tokens"))
    return parts


def _learner_activations(spec: RunSpec) -> int:
    cost = learner_pass_cost(spec)
    longest = cost.num_bytes(spec.max_context_tokens, min(spec.max_context_tokens, spec.max_generated_tokens))
    whole_batch = spec.groups_per_step * spec.group_size * spec.max_context_tokens
    usual = min(spec.micro_batch_tokens, whole_batch) * cost.num_bytes(1, 1)
    # A layer's gradient is made whole before it is added to the others.
    return max(longest, usual) + _largest_tensor(spec.model) * ELEMENT_BYTES[spec.dtype]


def _slot_parts(spec: RunSpec) -> list[Part]:
    slot = layout(spec.model).num_bytes(spec.dtype)
    told = "max_staleness or slots"
    parts = [Part(spec.learner_device, f"{spec.num_slots:,} weight slots", spec.num_slots * slot, told)]
    for device in spec.sampler_devices:
        if device not in (HOST, spec.learner_device):  # it copies each version that it uses
            parts.append(Part(device, f"copies of {spec.num_slots:,} weight slots", spec.num_slots * slot, told))
    return parts


def _supervisor_parts(spec: RunSpec) -> list[Part]:
    queues = BATCH_QUEUE_BYTES + spec.num_samplers * (REQUEST_QUEUE_BYTES + reply_queue_bytes(spec))
    num_groups = spec.ledger_shape.num_reservations
    trajectory = TRAJECTORY_BYTES + TRAJECTORY_TOKEN_BYTES * spec.max_context_tokens
    return [
        Part(HOST, "the supervisor and environments", SUPERVISOR_BYTES),
        Part(HOST, "queues", queues, "segment_tokens or samplers"),
        Part(HOST, "the version ledger", spec.ledger_shape.num_bytes, "max_staleness or groups_per_step"),
        Part(
            HOST,
            "trajectories on their way",
            num_groups * spec.group_size * trajectory,
            "group_size, groups_per_step or max_staleness",
        ),
    ]


def _sampler_parts(spec: RunSpec) -> list[Part]:
    cost = sampler_pass_cost(spec)
    tokens = min(spec.max_batch_tokens, spec.concurrency * spec.max_context_tokens)
    activations = cost.num_bytes(tokens, min(spec.concurrency, tokens))
    row = kv_token_bytes(spec.model, spec.dtype)
    parts: list[Part] = []
    for device in spec.sampler_devices:
        parts += _process(device, "the samplers' processes")
        parts.append(Part(device, "KV caches", spec.kv_tokens * row, "kv_gib"))
        parts.append(Part(device, "attention windows", int(WINDOW_SHARE * spec.kv_tokens * row), "kv_gib"))
        parts.append(Part(HOST, "tables of the KV caches", spec.kv_tokens * KV_ROW_BYTES, "kv_gib"))
        parts.append(Part(device, "activations of the samplers", activations, "concurrency"))
    return parts


def _process(device: str, what: str) -> list[Part]:
    if device == HOST:
        return [Part(HOST, what, WORKER_BYTES, "samplers")]
    return [Part(HOST, what, CUDA_WORKER_BYTES, "samplers"), Part(device, "CUDA contexts", CUDA_CONTEXT_BYTES)]


def learner_pass_cost(spec: RunSpec) -> PassCost:
    """Of forward and backward in this run's learner."""
    return learner_cost(
        spec.model,
        spec.dtype,
        temperature=spec.sampling["temperature"],
        has_reference=spec.kl_coefficient > 0,
        has_entropy=spec.entropy_coefficient > 0,
    )


def sampler_pass_cost(spec: RunSpec) -> PassCost:
    """Of a forward pass in one of this run's samplers."""
    narrows = spec.sampling["top_p"] < 1.0 or spec.sampling["top_k"] > 0
    return sampler_cost(spec.model, spec.dtype, temperature=spec.sampling["temperature"], narrows=narrows)


def kv_token_bytes(model: ModelConfig, dtype: str) -> int:
    """Of one token's keys and values in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * ELEMENT_BYTES[dtype]


def _largest_tensor(model: ModelConfig) -> int:
    return max(entry.num_elements for entry in layout(model).entries)


def totals(parts: Iterable[Part]) -> dict[str, int]:
    """Bytes by device."""
    found: dict[str, int] = defaultdict(int)
    for part in parts:
        found[part.device] += part.num_bytes
    return dict(found)


def refuse_too_large(parts: Sequence[Part], free: Mapping[str, int | None]) -> None:
    """Raise ConfigError unless each device has the bytes that it needs. free: by device; None: nobody can tell."""
    for device, need in sorted(totals(parts).items()):
        have = free.get(device)
        if have is not None and need > have:
            raise ConfigError(_refusal(device, need, have, [part for part in parts if part.device == device]))


def _refusal(device: str, need: int, have: int, parts: Sequence[Part]) -> str:
    sizes: dict[str, int] = defaultdict(int)
    lower = {part.what: part.lower for part in parts}
    for part in parts:
        sizes[part.what] += part.num_bytes
    largest = sorted(sizes, key=lambda what: -sizes[what])
    shown = ", ".join(f"{what} {in_gib(sizes[what])}" for what in largest if sizes[what] * 100 >= need)
    options = dict.fromkeys(lower[what] for what in largest if lower[what] and sizes[what] * 20 >= need)
    place = "this machine's memory" if device == HOST else device
    advice = f"Lower {', or '.join(options)}" if options else "Use a smaller model"
    return (
        f"This run needs {in_gib(need)} of {place}, where {in_gib(have)} are free: {shown}. {advice}, or use a larger "
        "machine."
    )


def in_gib(num_bytes: int) -> str:
    gib = num_bytes / GIB
    return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.2g} GiB" if gib < 1 else f"{gib:.1f} GiB"
