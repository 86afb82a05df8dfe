"""The shared memory of one run, and the start messages that tell each process where it lies.

The supervisor makes every block, so every block lives exactly as long as the run: `RunBlocks.close` frees them all.
"""

from dataclasses import replace
from itertools import chain
from typing import Any

from pipeline.environments.activity import NUM_BYTES, ActivityBoard
from pipeline.run_spec import RunSpec
from shm.block import WRONG_LOOKING, Block
from shm.ledger import Ledger
from shm.queue import QueueConsumer, QueueProducer
from workers.model_config import layout

REQUEST_QUEUE_BYTES = 4 << 20  # contexts on their way to one sampler
BYTES_PER_REPLY_TOKEN = 8  # int32 id and float32 log-prob
REPLY_QUEUE_BYTES = 8 << 20  # segments on their way back
BATCH_QUEUE_BYTES = 8 << 20  # rows on their way to the learner, at 20 bytes a token; larger batches go in pieces
LEARNER_ROW = 0  # of the ledger's worker table; samplers follow


def reply_queue_bytes(spec: RunSpec) -> int:
    """Of one sampler: room for several of the longest segments."""
    return max(REPLY_QUEUE_BYTES, 4 * BYTES_PER_REPLY_TOKEN * spec.reply_tokens)


class RunBlocks:
    """Ledger, slots and queues of one run. `sampler_queues` and `learner_queue` may be called again for a restarted
    worker: it gets new ones.
    """

    def __init__(self, spec: RunSpec, run_id: int) -> None:
        self._spec = spec
        self._run_id = run_id
        self._made: list[Block] = []
        self._rings: dict[int, list[Block]] = {}  # of the incarnation that each sampler has now
        self._ends: dict[str, tuple[QueueProducer | QueueConsumer, ...]] = {}  # ours, of each worker's incarnation
        try:
            ledger_block = self._make("ledger", spec.ledger_shape.num_bytes)
            self._ledger_fields = _fields(ledger_block)
            self.ledger = Ledger(ledger_block.view, spec.ledger_shape)
            self.ledger.format(run_id)
            self._batches: Block | None = None  # of the learner's incarnation that there is now
            # On CUDA the learner allocates the slots itself, and exports them: they die with it.
            self.slots_outlive_learner = spec.learner_device == "cpu"
            self._slots = self._make_slots() if self.slots_outlive_learner else {"num_slots": spec.num_slots}
        except BaseException:
            self.close()
            raise

    def _make_slots(self) -> dict[str, Any]:
        slot_bytes = layout(self._spec.model).num_bytes(self._spec.dtype)
        blocks = [self._make(f"slot-{i}", slot_bytes, WRONG_LOOKING) for i in range(self._spec.num_slots)]
        return {"blocks": [_fields(block) for block in blocks]}

    def learner_queue(self) -> tuple[QueueProducer, dict[str, Any]]:
        """A new queue for a new incarnation, in place of its predecessor's: our end, and the field for its config."""
        if self._batches is not None:
            self._batches.close()
            self._made.remove(self._batches)
        self._batches = self._make("batches", BATCH_QUEUE_BYTES, WRONG_LOOKING)
        producer = QueueProducer(self._batches.view)
        self._ends["learner"] = (producer,)
        return producer, {"batches_queue": _fields(self._batches)}

    def learner_config(self) -> dict[str, Any]:
        """Without its queue, and where it begins."""
        spec = self._spec
        return self._common() | {
            "worker": LEARNER_ROW,
            "weights": spec.weights,
            "device": spec.learner_device,
            "threads": spec.learner_threads,
            "slots": self._slots,
            "groups_per_step": spec.groups_per_step,
            "max_staleness": spec.max_staleness,
            "stale_policy": spec.stale_policy,
            "optimizer": spec.optimizer,
            "loss": spec.loss,
            "kl_coefficient": spec.kl_coefficient,
            "entropy_coefficient": spec.entropy_coefficient,
            "temperature": spec.sampling["temperature"],
            "micro_batch_tokens": spec.micro_batch_tokens,
            "trains": spec.trains,
        }

    def sampler_queues(self, index: int) -> tuple[QueueProducer, QueueConsumer, int, dict[str, Any]]:
        """New queues for a new incarnation, in place of its predecessor's: our ends, the room for replies in bytes, and
        the fields for its config.
        """
        for block in self._rings.pop(index, []):
            block.close()
            self._made.remove(block)
        capacity = reply_queue_bytes(self._spec)
        requests = self._make("requests", REQUEST_QUEUE_BYTES, WRONG_LOOKING)
        replies = self._make("replies", capacity, WRONG_LOOKING)
        self._rings[index] = [requests, replies]
        fields = {"requests_queue": _fields(requests), "replies_queue": _fields(replies)}
        producer, consumer = QueueProducer(requests.view), QueueConsumer(replies.view)
        self._ends[f"sampler {index}"] = (producer, consumer)
        return producer, consumer, capacity, fields

    def sampler_config(self, index: int, slots: dict[str, Any]) -> dict[str, Any]:
        """slots: what the learner's Ready said of them."""
        spec = self._spec
        return self._common() | {
            "worker": LEARNER_ROW + 1 + index,
            "device": spec.sampler_devices[index],
            "threads": spec.sampler_threads,
            "slots": slots,
            "kv_tokens": spec.kv_tokens,
            "max_batch_tokens": spec.max_batch_tokens,
            "sampling": spec.sampling,
        }

    def activity_board(self) -> tuple[ActivityBoard, dict[str, Any]]:
        """Where one environment process, and whoever takes its place, tells what it is at: our end, and the fields for
        its config.
        """
        block = self._make("activity", NUM_BYTES)
        board = ActivityBoard(block.view)
        board.format()
        return board, _fields(block)

    def ledger_place(self) -> dict[str, Any]:
        """What a process of the same user needs to read the ledger."""
        shape = self._spec.ledger_shape.to_fields()
        return {"ledger": self._ledger_fields, "run_id": self._run_id, "ledger_shape": shape}

    def close(self) -> None:
        # Not when garbage is collected: 20 MiB of rings, in objects that know one another, stayed of each run.
        for end in chain.from_iterable(self._ends.values()):
            end.close()
        self._ends.clear()
        for block in self._made:
            block.close()
        self._made.clear()

    def _common(self) -> dict[str, Any]:
        spec = self._spec
        # No context is longer, so no process needs rotations (or takes rows) beyond.
        model = replace(spec.model, max_positions=min(spec.model.max_positions, spec.max_context_tokens))
        return {
            "model": model.to_fields(),
            "seed": spec.seed,
            "dtype": spec.dtype,
            "check_weights": spec.check_weights,
            "ledger": self._ledger_fields,
            "run_id": self._run_id,
            "ledger_shape": spec.ledger_shape.to_fields(),
        }

    def _make(self, name: str, num_bytes: int, fill: int | None = None) -> Block:
        block = Block.create(name, num_bytes, fill)
        self._made.append(block)
        return block


def _fields(block: Block) -> dict[str, Any]:
    return {"path": block.path, "num_bytes": block.num_bytes}
