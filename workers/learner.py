"""The learner process: gradients of the batches it is sent, optimizer steps that the gate allows, weights into slots.

It owns the version and slot words of the ledger. An update is whole when its slot is READY and `policy_version` is
written; only then it answers `Published`, and only after that answer does anyone admit, pin or count at the new
version.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shm.errors import GateError
from shm.gate import refusal
from shm.ledger import Activity, State
from shm.queue import QueueConsumer
from shm.weights import DTYPES
from workers.attach import Attachments
from workers.channel import WorkerChannel
from workers.errors import CheckpointError
from workers.messages import (
    Consumed,
    ForwardBackward,
    GradientsDone,
    Message,
    OptimStep,
    Payload,
    Published,
    Save,
    Saved,
)
from workers.model import init_flat
from workers.model_files.flat_weights import load_flat, remove_unfinished, save_weights
from workers.model_files.optimizer_file import save_optimizer
from workers.packing import TrainingRows
from workers.serving import HEARTBEAT_SECONDS, ends_run, introduce, serve_run
from workers.training import Trainee
from workers.transfer import Inbox


def serve(channel: WorkerChannel, config: dict[str, Any]) -> dict[str, Any] | None:
    """One run; returns the next one's config, or None when told to stop."""
    return serve_run(channel, config, Learner)


class Learner:
    """The trainee between its channel, its batch queue, the gate and the weight slots."""

    def __init__(self, channel: WorkerChannel, config: dict[str, Any], attached: Attachments) -> None:
        self._channel = channel
        self._ledger = attached.ledger
        self._row = introduce(channel, config, attached)
        batches = attached.block("batches_queue")
        self._inbox = Inbox(QueueConsumer(batches.view))
        self._slots = attached.open_slots()  # before anything else takes device memory
        self._with_checksum: bool = config["check_weights"]
        self._groups_per_step: int = config["groups_per_step"]
        self._max_staleness: int = config["max_staleness"]
        self._stale_policy: str = config["stale_policy"]
        # Of the segments in the gradients accumulated so far: those whose age the gate judges, and, under mask_span,
        # those that weigh nothing. `at` is the version that these gradients belong to.
        self._trained_versions: set[int] = set()
        self._weightless_versions: set[int] = set()
        self._gradients_at = 0
        self._trainee, self._untrained = None, self._load(config, attached)
        if config["trains"]:
            self._trainee, self._untrained = self._make_trainee(config, attached, self._untrained), None

    def _load(self, config: dict[str, Any], attached: Attachments) -> Tensor:
        """The first weights, float32 [num_elements]."""
        if config["weights"] is None:
            return init_flat(attached.model, config["seed"]).to(config["device"])
        return load_flat(config["weights"], attached.model, config["device"], lambda: self._row.beat(Activity.STARTING))

    def _make_trainee(self, config: dict[str, Any], attached: Attachments, initial: Tensor) -> Trainee:
        return Trainee(
            attached.model,
            initial,
            optimizer=config["optimizer"],
            loss=config["loss"],
            kl_coefficient=config["kl_coefficient"],
            entropy_coefficient=config["entropy_coefficient"],
            dtype=DTYPES[config["dtype"]],
            temperature=config["temperature"],
            micro_batch_tokens=config["micro_batch_tokens"],
        )

    def begin(self) -> dict[str, Any]:
        """Publish version 0; tell how samplers open the slots: as given on the CPU, as IPC handles on CUDA."""
        self.publish(version=0, slot=0)
        self._untrained = None  # without training nothing else is ever published
        return {"slots": self._slots.description()}

    def loop(self) -> Message:
        """Serve; returns the message that ends the run."""
        num_updates = 0
        while True:
            # Between the chunks of a batch, and before its step, it waits with work begun.
            has_begun = self._trainee is not None and self._trainee.has_gradients
            self._row.beat(Activity.WAITING if has_begun else Activity.IDLE, num_updates)
            message = self._channel.receive(HEARTBEAT_SECONDS)
            if message is None:
                continue
            self._row.beat(Activity.BUSY, num_updates)
            if ends_run(message):
                return message
            if isinstance(message, Payload):
                self._inbox.add_piece(message)
                self._channel.send(Consumed(consumed=self._inbox.consumed))
            elif isinstance(message, ForwardBackward):
                self._forward_backward(message)
            elif isinstance(message, OptimStep):
                self._optim_step(message)
                num_updates += 1
            elif isinstance(message, Save):
                self._save(message)

    def publish(self, version: int, slot: int) -> int:
        """Copy the weights into `slot`, mark it READY, then write `policy_version`. Returns the bytes copied."""
        weights = self._untrained if self._trainee is None else self._trainee.flat
        self._ledger.write_slot(slot, version, State.WRITING)
        num_bytes = self._slots.publish(slot, weights)  # on CUDA it returns when the copy is done
        checksum = self._slots.checksum(slot) if self._with_checksum else 0
        self._ledger.write_slot(slot, version, State.READY, checksum)
        self._ledger.write_policy_version(version)
        return num_bytes

    def _forward_backward(self, message: ForwardBackward) -> None:
        rows = read_rows(message, self._inbox)
        version = self._ledger.policy_version()
        if message.zero_gradients:
            self._trained_versions, self._weightless_versions = set(), set()
            self._gradients_at = version
        elif version != self._gradients_at:
            raise GateError(
                f"A chunk of batch {message.batch} came at version {version}, but its first one at version "
                f"{self._gradients_at}; all chunks of a batch must see the same weights."
            )
        self._note_versions(rows)
        metrics = self._trainee.forward_backward(
            rows,
            version=version,
            zero_gradients=message.zero_gradients,
            batch=message.batch,
            beat=lambda: self._row.beat(Activity.BUSY),
        )
        self._channel.send(GradientsDone(batch=message.batch, metrics=metrics, consumed=self._inbox.consumed))

    def _note_versions(self, rows: TrainingRows) -> None:
        """For the gate. Only under mask_span may a segment be too old, and then no token of it may have a place in
        the loss.
        """
        generated = rows.versions >= 0
        trained = generated & (rows.scales != 0) if self._stale_policy == "mask_span" else generated
        self._trained_versions.update(np.unique(rows.versions[trained]).tolist())
        self._weightless_versions.update(np.unique(rows.versions[generated & ~trained]).tolist())

    def _optim_step(self, message: OptimStep) -> None:
        self._pass_gate(message)
        self._row.beat(Activity.PUBLISHING)
        metrics = self._trainee.optimizer_step(
            lr=message.lr, gradient_scale=message.gradient_scale, batch=message.batch
        )
        started = time.monotonic()
        num_bytes = self.publish(message.to_version, message.slot)
        metrics["train/publish_seconds"] = time.monotonic() - started
        metrics["publish_bytes"] = float(num_bytes)
        # What the learner itself has seen, whatever the supervisor believes; the gate bounds it but for keep.
        metrics["staleness/trained_age_max"] = float(message.from_version - min(self._trained_versions))
        self._channel.send(
            Published(version=message.to_version, slot=message.slot, metrics=metrics, consumed=self._inbox.consumed)
        )

    def _save(self, message: Save) -> None:
        """Answer for it either way: a full disk is no reason to end the process that holds the weights."""
        version = self._ledger.policy_version()
        num_bytes, error = 0, None
        try:
            if message.version != version:
                raise CheckpointError(f"The learner is at version {version}, so version {message.version} isn't saved.")
            num_bytes = self._write(message)
        except CheckpointError as broken:
            error = str(broken)
        self._channel.send(Saved(version=version, num_bytes=num_bytes, error=error, consumed=self._inbox.consumed))

    def _write(self, message: Save) -> int:
        """The files that it asks for, all or none; returns their bytes. Raises CheckpointError."""

        def beat() -> None:
            self._row.beat(Activity.BUSY)

        remove_unfinished(message.path)
        num_bytes = save_weights(message.path, self._trainee.flat, self._trainee.config, beat=beat)
        if message.optimizer_path is not None:
            try:
                remove_unfinished(message.optimizer_path)
                num_bytes += save_optimizer(message.optimizer_path, self._trainee.optimizer_state, beat)
            except CheckpointError:
                Path(message.path).unlink(missing_ok=True)
                raise
        return num_bytes

    def _pass_gate(self, message: OptimStep) -> None:
        """Refuse the step unless every segment is young enough and everyone left behind can still train in time.

        The ledger is read here, by the process that holds the weights: the bound holds even if the supervisor errs.
        """
        version = self._ledger.policy_version()
        if (message.from_version, message.to_version) != (version, version + 1):
            raise GateError(
                f"A step from version {message.from_version} to {message.to_version} was asked for "
                f"at version {version}."
            )
        if self._ledger.read_lease(message.slot) != 0:
            raise GateError(
                f"Slot {message.slot} is still leased; version {message.to_version} can't be written there."
            )
        _, reservations = self._ledger.reservations(message.epoch)
        consumed = set(message.groups)
        why = refusal(
            versions=sorted(self._trained_versions),
            weightless=sorted(self._weightless_versions),
            left_behind=[(group, admitted) for group, admitted in reservations if group not in consumed],
            from_version=version,
            groups_per_update=self._groups_per_step,
            max_staleness=None if self._stale_policy == "keep" else self._max_staleness,
        )
        if why is not None:
            raise GateError(why)


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
