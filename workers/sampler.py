"""The sampler process: requests in, segments out, several policy versions at once.

The story of `serve`: open what the start message names, say ready, then loop: read what has arrived, let the engine
take one step, send back what it finished. A request names its version and the slot that holds it; the supervisor
holds a lease on that slot until it says `Release`, so the weights are used in place, without a copy.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from shm.errors import WeightsError
from shm.ledger import Activity, Ledger, State
from shm.queue import QueueConsumer, QueueProducer
from shm.weights import DTYPES, WeightSlots
from workers.attach import Attachments
from workers.channel import WorkerChannel
from workers.generation.engine import Engine
from workers.generation.engine_requests import EngineRequest, FinishedSegment
from workers.messages import (
    Generate,
    GenerateRequest,
    Message,
    Payload,
    Release,
    Segment,
    Segments,
)
from workers.model import bind_weights
from workers.serving import HEARTBEAT_SECONDS, ends_run, introduce, mistaken, serve_run
from workers.transfer import Inbox


def serve(channel: WorkerChannel, config: dict[str, Any]) -> dict[str, Any] | None:
    """One run; returns the next one's config, or None when told to stop."""
    return serve_run(channel, config, Sampler)


class Sampler:
    """The engine between its channel, its queues and the weight slots."""

    def __init__(self, channel: WorkerChannel, config: dict[str, Any], attached: Attachments) -> None:
        self._channel = channel
        self._attached = attached
        self._ledger: Ledger = attached.ledger
        self._row = introduce(channel, config, attached)
        requests = attached.block("requests_queue")
        self._inbox = Inbox(QueueConsumer(requests.view))
        self._replies = QueueProducer(attached.block("replies_queue").view)
        self._slots: WeightSlots = attached.open_slots()
        self._device = torch.device(config["device"])
        self._check_weights: bool = config["check_weights"]
        self._slot_of_version: dict[int, int] = {}
        self._live: dict[int, int] = {}  # requests that are with the engine -> their version
        sampling = config["sampling"]
        self.engine = Engine(
            attached.model,
            seed=config["seed"],
            kv_tokens=config["kv_tokens"],
            max_batch_tokens=config["max_batch_tokens"],
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            top_k=sampling["top_k"],
            stop_ids=tuple(sampling["stop_ids"]),
            device=config["device"],
            dtype=DTYPES[config["dtype"]],
            beat=partial(self._row.beat, Activity.BUSY),  # no circle by self: what is mapped must go with the run
        )

    def begin(self) -> dict[str, Any]:
        """Nothing: it is ready."""
        return {}

    def loop(self) -> Message:
        """Serve; returns the message that ends the run."""
        while True:
            activity = self._activity()
            self._row.beat(activity, self.engine.num_computed)
            message = self._channel.receive(0.0 if self.engine.has_work else HEARTBEAT_SECONDS)
            while message is not None:
                if ends_run(message):
                    return message
                self._take(message)
                message = self._channel.receive(0.0)
            if self.engine.has_work:
                if activity != Activity.BUSY:  # the time of this step is not that of the wait before it
                    self._row.beat(Activity.BUSY)
                if self._check_weights:
                    self._verify_weights()
                finished = self.engine.step()
                if finished:
                    self._send(finished)
            report = self._inbox.report()
            if report is not None:
                self._channel.send(report)

    def _activity(self) -> Activity:
        """Without a request, but with trajectories that will ask again, it waits for their tools."""
        if self.engine.has_work:
            return Activity.BUSY
        return Activity.WAITING if self.engine.num_trajectories else Activity.IDLE

    def _take(self, message: Message) -> None:
        consumed = getattr(message, "consumed", 0)
        if consumed:
            self._replies.release(consumed)
        if isinstance(message, Generate):
            for request in message.requests:
                self._add(request)
        elif isinstance(message, Payload):
            self._inbox.add_piece(message)
        elif isinstance(message, Release):
            released = [self.engine.release(group, member) for group, member in message.trajectories]
            cancelled = [self._nothing(request) for request in released if request is not None]
            if cancelled:
                self._send(cancelled)
            for version in message.versions:
                if self._slot_of_version.pop(version, None) is not None:
                    self.engine.drop_version(version)
        else:
            raise mistaken("sampler", message, Generate, Payload, Release)

    def _add(self, request: GenerateRequest) -> None:
        if request.version not in self._slot_of_version:
            self._bind(request.version, request.slot)
        tokens = np.frombuffer(self._inbox.take(request.position, 4 * request.num_tokens), dtype=np.int32)
        self._live[request.request] = request.version
        self.engine.add(
            EngineRequest(
                request=request.request,
                group=request.group,
                member=request.member,
                version=request.version,
                tokens=tokens,
                max_tokens=request.max_tokens,
                generated=request.generated,
                kv_max_age=request.kv_max_age,
            )
        )

    def _bind(self, version: int, slot: int) -> None:
        """Use the slot's weights in place. The request came after `Published`, so the ledger must agree by now."""
        found = self._ledger.slot(slot)
        if found.version != version or found.state != State.READY:
            raise WeightsError(
                f"A request names version {version} in slot {slot}, but the slot holds version {found.version} "
                f"({found.state.name}); its lease was not kept."
            )
        flat = self._slots.flat(slot)
        if not self._slots.in_place:  # on another GPU: one copy, peer to peer, when the version is first used
            flat = flat.to(self._device)
        self.engine.set_weights(version, bind_weights(flat, self._attached.model))
        self._slot_of_version[version] = slot

    def _verify_weights(self) -> None:
        """The checksum mode of the tests: every slot that is computed with holds exactly what was published there."""
        for version in set(self._live.values()):
            slot = self._slot_of_version[version]
            found = self._ledger.slot(slot)
            if found.version != version or found.checksum != self._slots.checksum(slot):
                raise WeightsError(f"Slot {slot} no longer holds version {version} as published: torn weights.")

    def _nothing(self, request: int) -> FinishedSegment:
        """What answers a request that its trajectory's end has cancelled: its room and its place are free again."""
        tokens, logprobs = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        version = self._live[request]
        return FinishedSegment(request, version, version, tokens, logprobs, 0, False, 0.0, 0.0, 0, 0)

    def _send(self, finished: list[FinishedSegment]) -> None:
        """Room for each reply was reserved with its request, so the write never waits."""
        segments = []
        for segment in finished:
            del self._live[segment.request]
            position = self._replies.write(segment.tokens, segment.logprobs)
            segments.append(
                Segment(
                    request=segment.request,
                    version=segment.version,
                    kv_version=segment.kv_version,
                    position=position,
                    num_tokens=len(segment.tokens),
                    cached=segment.cached,
                    stopped=segment.stopped,
                    seconds=segment.seconds,
                    queue_seconds=segment.queue_seconds,
                    evictions=segment.evictions,
                    dropped=segment.dropped,
                )
            )
        self._channel.send(Segments(segments=segments, consumed=self._inbox.consumed))
