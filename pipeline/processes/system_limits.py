"""What a run needs that a process may have only so much of, compared with that before any process starts."""

from pipeline.errors import ConfigError
from pipeline.processes.worker.run_blocks import BATCH_QUEUE_BYTES, REQUEST_QUEUE_BYTES, reply_queue_bytes
from pipeline.run_spec import RunSpec
from workers.machine.limits import largest_file, open_descriptors, raise_descriptor_limit
from workers.model_config import layout

# Descriptors of the supervisor. A block has two, its own and that of its mapping; a link to a process has a socket that
# listens, one that is connected, and one of ZeroMQ's own; a process has one that tells of its end.
PER_BLOCK = 2
PER_PROCESS = 5  # with the pipe by which a keeper tells whom it keeps
PER_SAMPLER = PER_PROCESS + 2 * PER_BLOCK
PER_ENVIRONMENT_PROCESS = PER_PROCESS + PER_BLOCK
PER_SESSION = 2  # of an agent that drives a rollout: it may ask, and wait, on two connections at once
OTHERS = 64  # asyncio's, ZeroMQ's threads, logs, the journal, locks; while a process starts, or a checkpoint is made


def needed_descriptors(spec: RunSpec, num_environment_processes: int, *, has_endpoint: bool) -> int:
    """Most that the supervisor has open at once in a run of `spec`, beside those that are open before."""
    num_blocks = 2 + spec.num_slots  # the ledger, the batches
    return (
        OTHERS
        + PER_BLOCK * num_blocks
        + PER_PROCESS
        + PER_SAMPLER * spec.num_samplers
        + PER_ENVIRONMENT_PROCESS * num_environment_processes
        + PER_SESSION * spec.concurrency * has_endpoint
    )


def refuse_small_limits(spec: RunSpec, num_environment_processes: int, *, has_endpoint: bool) -> None:
    """Raise ConfigError where the run would end at a limit of the system. A limit on descriptors that this process may
    raise itself is raised.
    """
    used = open_descriptors()
    need = used + needed_descriptors(spec, num_environment_processes, has_endpoint=has_endpoint)
    have = raise_descriptor_limit(need)
    if have < need:
        lower = "concurrency" if has_endpoint else "samplers or environment_processes"
        raise ConfigError(
            f"This run needs up to {need} files open in one process ({used} are open already), and that may have "
            f"{have}; raise the limit (ulimit -Hn), or lower {lower}."
        )
    largest, limit = largest_bytes(spec), largest_file()
    if limit is not None and limit < largest:
        raise ConfigError(
            f"This run makes files and shared memory of up to {largest:,} bytes, and a file of this process may have "
            f"{limit:,}; raise the limit (ulimit -f)."
        )


def largest_bytes(spec: RunSpec) -> int:
    """Of the largest file or block of a run: the optimizer's state on disk, a weight slot, or a queue."""
    sizes = layout(spec.model)
    queues = (BATCH_QUEUE_BYTES, REQUEST_QUEUE_BYTES, reply_queue_bytes(spec))
    return max((2 if spec.trains else 1) * sizes.num_bytes("float32"), sizes.num_bytes(spec.dtype), *queues)
