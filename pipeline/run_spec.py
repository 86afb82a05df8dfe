"""RunSpec: what the processes of one run must know, as plain values; `memory/make_spec.py` makes it from configs."""

from dataclasses import dataclass, field
from typing import Any

from shm.ledger import LedgerShape
from workers.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Checked by the configs that it comes from."""

    model: ModelConfig
    seed: int
    weights: str | None = None  # the model directory that version 0 is loaded from; None: random weights
    max_staleness: int  # optimizer updates
    stale_policy: str  # wait, mask_span or keep: what the gate refuses
    groups_per_step: int
    group_size: int
    num_slots: int
    num_samplers: int
    sampling: dict[str, Any]  # temperature, top_p, top_k, stop_ids
    optimizer: dict[str, Any]
    loss: dict[str, Any]
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    trains: bool = True  # False: the learner only loads weights and publishes them
    concurrency: int  # most trajectories at once, those of an evaluation beside training included
    max_generated_tokens: int  # of one trajectory
    max_context_tokens: int  # of one trajectory: what the budget, the model and the KV pool all allow
    kv_tokens: int
    reply_tokens: int  # largest segment that may be asked for
    max_batch_tokens: int
    micro_batch_tokens: int
    sampler_threads: int
    learner_threads: int
    learner_device: str = "cpu"
    sampler_devices: list[str] = field(default_factory=lambda: ["cpu"])
    dtype: str = "float32"  # of the slots and of all computation; master weights are float32
    environment_timeout: float = 600.0  # seconds that one call into an environment may take
    environment_processes: int | None = None  # None: by the cores
    max_tool_chars: int | None = None  # where an environment's process cuts a tool's result; None: nowhere
    worker_timeout: float = 60.0  # seconds without a sign of life after which a worker is killed
    max_restarts: int = 5  # of processes of one kind within ten minutes
    check_weights: bool = False  # checksum mode: samplers verify their slots before every step

    @property
    def ledger_shape(self) -> LedgerShape:
        return LedgerShape(
            num_slots=self.num_slots,
            num_reservations=(1 + self.max_staleness) * self.groups_per_step,
            num_workers=1 + self.num_samplers,
        )
