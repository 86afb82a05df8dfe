"""The learner process: gradients of the batches it is sent, optimizer steps that the gate allows, weights into slots.

It owns the version and slot words of the ledger. An update is whole when its slot is READY and `policy_version` is
written; only then it answers `Published`, and only after that answer does anyone admit, pin or count at the new
version.

One that takes a dead one's place, or that a resumed run begins with, starts from saved weights and optimizer and
replays the updates since, up to the version that was committed. It writes `policy_version` when it is there.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shm.errors import GateError, LedgerError
from shm.ledger import Activity, State
from shm.queue import QueueConsumer
from shm.weights import DTYPES
from workers.attach import Attachments
from workers.channel import WorkerChannel
from workers.errors import CheckpointError
from workers.learning.batch_ages import BatchAges
from workers.learning.packing import TrainingRows
from workers.learning.training import Trainee
from workers.messages import (
    Consumed,
    ForwardBackward,
    GradientsDone,
    Message,
    OptimStep,
    Payload,
    Published,
    Replayed,
    ReplayStep,
    Save,
    Saved,
)
from workers.model import init_flat
from workers.model_files.flat_weights import Written, load_flat, remove_unfinished, save_weights
from workers.model_files.optimizer_file import load_optimizer, save_optimizer
from workers.serving import HEARTBEAT_SECONDS, ends_run, introduce, mistaken, serve_run
from workers.transfer import Inbox


def serve(channel: WorkerChannel, config: dict[str, Any]) -> dict[str, Any] | None:
    """One run; returns the next one's config, or None when told to stop."""
    return serve_run(channel, config, Learner)


class Learner:
    """The trainee between its channel, its batch queue, the gate and the weight slots.

    config["base"]: {"version", "weights", "optimizer"}: where it begins, with a model directory and a file, both null
    for the model's own weights. config["replay_to"]: the version that is committed once the updates since are replayed.
    """

    def __init__(self, channel: WorkerChannel, config: dict[str, Any], attached: Attachments) -> None:
        self._channel = channel
        self._ledger = attached.ledger
        self._row = introduce(channel, config, attached)
        batches = attached.block("batches_queue")
        self._inbox = Inbox(QueueConsumer(batches.view))
        self._slots = attached.open_slots()  # before anything else takes device memory
        if "num_slots" in config["slots"]:  # they are this process's own, and new
            for slot in range(config["slots"]["num_slots"]):
                self._ledger.write_slot(slot, -1, State.EMPTY)
        self._with_checksum: bool = config["check_weights"]
        self._ages = BatchAges(config["groups_per_step"], config["max_staleness"], config["stale_policy"])
        self._base = config["base"]
        self._version: int = self._base["version"]
        self._replay_to: int = config["replay_to"]
        self._num_updates = 0  # without replayed ones: for the ledger
        self._trainee, self._untrained = None, None
        if config["trains"]:
            self._trainee = self._make_trainee(config, attached)
        else:
            self._untrained = self._load(config["weights"], config, attached)

    def _load(self, weights: str | None, config: dict[str, Any], attached: Attachments) -> Tensor:
        """Those of a model directory, or the random ones that a run begins with; float32 [num_elements]."""
        if weights is None:
            return init_flat(attached.model, config["seed"]).to(config["device"])
        return load_flat(weights, attached.model, config["device"], lambda: self._row.beat(Activity.STARTING))

    def _make_trainee(self, config: dict[str, Any], attached: Attachments) -> Trainee:
        saved = self._base["weights"]
        dtype = DTYPES[config["dtype"]]
        reference = None
        if saved is not None and config["kl_coefficient"] > 0:  # the policy that the run began with; first, and rounded
            reference = self._load(config["weights"], config, attached).to(dtype)  # at once, for the sake of memory
        initial = self._load(config["weights"] if saved is None else saved, config, attached)
        trainee = Trainee(
            attached.model,
            initial,
            reference=reference,
            optimizer=config["optimizer"],
            loss=config["loss"],
            kl_coefficient=config["kl_coefficient"],
            entropy_coefficient=config["entropy_coefficient"],
            dtype=dtype,
            temperature=config["temperature"],
            micro_batch_tokens=config["micro_batch_tokens"],
        )
        if saved is not None:
            load_optimizer(self._base["optimizer"], trainee.optimizer_state, lambda: self._row.beat(Activity.STARTING))
        return trainee

    def begin(self) -> dict[str, Any]:
        """Publish the version it begins with, if it is wanted; tell how samplers open the slots (as given on the CPU,
        as IPC handles on CUDA), and how far the weights are from those in that slot (see `Replayed`).
        """
        slot: int = self._base["slot"]
        difference = self._restore(slot) if slot >= 0 else 0.0
        self._commit_when_replayed()
        self._untrained = None  # without training nothing else is ever published
        return {"slots": self._slots.description(), "difference": difference}

    def loop(self) -> Message:
        """Serve; returns the message that ends the run."""
        while True:
            # Between the chunks of a batch, and before its step, it waits with work begun.
            has_begun = self._trainee is not None and self._trainee.has_gradients
            self._row.beat(Activity.WAITING if has_begun else Activity.IDLE, self._num_updates)
            message = self._channel.receive(HEARTBEAT_SECONDS)
            if message is None:
                continue
            self._row.beat(Activity.BUSY, self._num_updates)
            if ends_run(message):
                return message
            self.handle(message)

    def handle(self, message: Message) -> None:
        """Do what it asks for, and answer. Raises MessageError when no learner takes such a message."""
        if isinstance(message, Payload):
            self._inbox.add_piece(message)
            self._channel.send(Consumed(consumed=self._inbox.consumed))
        elif isinstance(message, ForwardBackward):
            self._forward_backward(message)
        elif isinstance(message, ReplayStep):
            self._replay_step(message)
        elif isinstance(message, OptimStep):
            self._optim_step(message)
            self._num_updates += 1
        elif isinstance(message, Save):
            self._save(message)
        else:
            raise mistaken("learner", message, Payload, ForwardBackward, ReplayStep, OptimStep, Save)

    def _fill(self, slot: int) -> int:
        """Copy the weights into `slot` and mark it READY. Returns the bytes copied."""
        weights = self._untrained if self._trainee is None else self._trainee.flat
        self._ledger.write_slot(slot, self._version, State.WRITING)
        num_bytes = self._slots.publish(slot, weights)  # on CUDA it returns when the copy is done
        checksum = self._slots.checksum(slot) if self._with_checksum else 0
        self._ledger.write_slot(slot, self._version, State.READY, checksum)
        return num_bytes

    def _restore(self, slot: int) -> float:
        """Have `slot` hold the version it is at, as a learner before may have left it; returns how far the weights are
        from those that are there already, which are left alone: samplers may use them.
        """
        try:
            found = self._ledger.slot(slot)
        except LedgerError:  # it was killed while it wrote that record, so nobody has been told of the version
            found = None
        if found is not None and (found.version, found.state) == (self._version, State.READY):
            weights = self._untrained if self._trainee is None else self._trainee.flat
            return self._slots.difference(slot, weights)
        self._fill(slot)
        return 0.0

    def _commit_when_replayed(self) -> None:
        if self._version == self._replay_to:
            self._ledger.write_policy_version(self._version)

    def _check_committed(self) -> None:
        """What it holds must be what everybody counts with."""
        committed = self._ledger.policy_version()
        if committed != self._version or self._version < self._replay_to:
            raise GateError(
                f"The learner's weights are of version {self._version}, but version {committed} is committed "
                f"(replayed up to {self._replay_to})."
            )

    def _forward_backward(self, message: ForwardBackward) -> None:
        rows = read_rows(message, self._inbox)
        if self._version >= self._replay_to:
            self._check_committed()
        if message.zero_gradients:
            self._ages.begin(self._version)
        self._ages.add(rows, message.batch, self._version)
        metrics = self._trainee.forward_backward(
            rows,
            version=self._version,
            zero_gradients=message.zero_gradients,
            batch=message.batch,
            beat=lambda: self._row.beat(Activity.BUSY),
        )
        self._channel.send(GradientsDone(batch=message.batch, metrics=metrics, consumed=self._inbox.consumed))

    def _optim_step(self, message: OptimStep) -> None:
        self._check_committed()
        self._ages.pass_gate(message, self._version, self._ledger)
        self._row.beat(Activity.PUBLISHING)
        # What the learner itself has seen, whatever the supervisor believes; the gate bounds it but for keep.
        age = float(self._ages.largest)
        metrics = self._step(message)
        started = time.monotonic()
        num_bytes = self._fill(message.slot)
        self._ledger.write_policy_version(self._version)
        metrics["train/publish_seconds"] = time.monotonic() - started
        metrics["publish_bytes"] = float(num_bytes)
        metrics["staleness/trained_age_max"] = age
        self._channel.send(
            Published(version=self._version, slot=message.slot, metrics=metrics, consumed=self._inbox.consumed)
        )

    def _step(self, message: OptimStep | ReplayStep) -> dict[str, float]:
        metrics = self._trainee.optimizer_step(
            lr=message.lr, gradient_scale=message.gradient_scale, batch=message.batch
        )
        self._version += 1
        return metrics

    def _replay_step(self, message: ReplayStep) -> None:
        if self._version >= self._replay_to:
            raise GateError(f"Batch {message.batch} was to be replayed at version {self._version}, where replay ended.")
        self._ages.pass_replay(message.from_version, self._version)
        self._row.beat(Activity.PUBLISHING)
        self._step(message)
        difference = self._restore(message.slot) if message.slot >= 0 else 0.0
        self._commit_when_replayed()
        self._channel.send(Replayed(version=self._version, difference=difference, consumed=self._inbox.consumed))

    def _save(self, message: Save) -> None:
        """Answer for it either way: a full disk is no reason to end the process that holds the weights."""
        version, num_bytes, checksums, error = self._version, 0, [], None
        try:
            if message.version != version:
                raise CheckpointError(f"The learner is at version {version}, so version {message.version} isn't saved.")
            written = self._write(message)
            num_bytes, checksums = sum(one.num_bytes for one in written), [one.checksum for one in written]
        except CheckpointError as broken:
            error = str(broken)
        self._channel.send(
            Saved(
                version=version,
                num_bytes=num_bytes,
                checksums=checksums,
                error=error,
                consumed=self._inbox.consumed,
            )
        )

    def _write(self, message: Save) -> tuple[Written, Written]:
        """The weights' file and the optimizer's, both or none. Raises CheckpointError."""

        def beat() -> None:
            self._row.beat(Activity.BUSY)

        remove_unfinished(message.path)
        weights = save_weights(message.path, self._trainee.flat, self._trainee.config, beat=beat)
        try:
            remove_unfinished(message.optimizer_path)
            return weights, save_optimizer(message.optimizer_path, self._trainee.optimizer_state, beat)
        except CheckpointError:
            Path(message.path).unlink(missing_ok=True)
            raise


def read_rows(message: ForwardBackward, inbox: Inbox) -> TrainingRows:
    """The arrays of a ForwardBackward's payload (see its docstring for their order)."""
    data = inbox.take(message.position, message.length)
    rows, tokens = message.num_rows, message.num_tokens
    words = np.frombuffer(data, dtype=np.int32)  # six arrays of 4-byte words end to end
    ids, weights, scales, logprobs, versions = np.split(words[rows:], [k * tokens for k in (1, 2, 3, 4)])
    return TrainingRows(
        lengths=words[:rows],
        tokens=ids,
        weights=weights.view(np.float32),
        scales=scales.view(np.float32),
        behaviour_logprobs=logprobs.view(np.float32),
        versions=versions,
    )
