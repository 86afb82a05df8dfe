"""The supervisor's end of one sampler: requests out as rooms allow, segments in, nothing lost when it is restarted."""

import asyncio
import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.processes.sampler.priority import Priority
from pipeline.processes.worker.run_blocks import BYTES_PER_REPLY_TOKEN
from shm.errors import QueueError
from shm.queue import QueueConsumer, QueueProducer, ReplyRoom
from workers.messages import Consumed, Generate, GenerateRequest, Message, Release, Segments
from workers.transfer import IN_PIECES, Outbox

BYTES_PER_TOKEN = 4  # int32 id in a request


class Pick(NamedTuple):
    """What a request is computed with: a version, whose slot is leased, and how old its KV may be (versions)."""

    version: int
    slot: int
    kv_max_age: int = 0


@dataclass(slots=True)
class SegmentResult:
    """A finished request; but for its tokens and their log-probs, fields as in `messages.Segment`."""

    tokens: list[int]
    logprobs: list[float]
    version: int
    kv_version: int
    cached: int
    stopped: bool
    seconds: float
    queue_seconds: float
    evictions: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Request:
    """A request that is waiting or with the sampler. `picked` is its version once it has left."""

    priority: Priority
    number: int
    group: int
    member: int
    pick: Callable[[], Pick]
    context: array
    max_tokens: int
    generated: int
    future: asyncio.Future
    picked: Pick | None = None

    def header(self, position: int) -> GenerateRequest:
        assert self.picked is not None, "a request leaves with its version"
        return GenerateRequest(
            request=self.number,
            group=self.group,
            member=self.member,
            version=self.picked.version,
            slot=self.picked.slot,
            position=position,
            num_tokens=len(self.context),
            max_tokens=self.max_tokens,
            generated=self.generated,
            kv_max_age=self.picked.kv_max_age,
        )


def _name(request: _Request) -> str:
    return f"{request.group}.{request.member} ({len(request.context)} tokens, at most {request.max_tokens} more)"


class RequestLimit:
    """`max_sample_requests`, shared by all samplers."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self.wake: list[Callable[[], None]] = []

    def take(self) -> bool:
        if self.outstanding >= self.limit:
            return False
        self.outstanding += 1
        return True

    def give_back(self) -> None:
        self.outstanding -= 1


class SamplerClient:
    """Requests to one sampler. All of it runs in the run's loop; `connect` gives it a (new) incarnation to speak to."""

    def __init__(self, index: int, limit: RequestLimit, on_error: Callable[[Exception], None]) -> None:
        """on_error gets what goes wrong where nobody waits."""
        self.index = index
        self._on_error = on_error
        self.num_trajectories = 0  # pinned to this sampler now
        self._limit = limit
        self._limit.wake.append(self.flush)
        self._numbers = 0
        # (priority, number, request): a heap
        self._waiting: list[tuple[Priority, int, _Request]] = []
        self._sent: dict[int, _Request] = {}
        self._after: dict[int, Callable[[], None]] = {}  # by request: what waits for the sampler to be done with it
        self._released: list[list[int]] = []
        self._versions: list[int] = []
        self._send: Callable[[Message], None] | None = None
        self._large: asyncio.Task | None = None
        self._flush_due = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a sampler to speak to."""
        return self._send is not None

    @property
    def num_waiting(self) -> int:
        """Requests of training that are asked for and not yet with the sampler; evaluations count nowhere."""
        return sum(request.group >= 0 and not request.future.done() for *_, request in self._waiting)

    def state(self) -> dict[str, Any]:
        """For a report: what waits, what the sampler has, and the room there is."""
        found = {"connected": self._send is not None, "waiting": [_name(one) for *_, one in sorted(self._waiting)[:50]]}
        found |= {"with_sampler": [_name(one) for one in self._sent.values()], "num_waiting": len(self._waiting)}
        found |= {"outstanding_of_all": self._limit.outstanding, "max_sample_requests": self._limit.limit}
        if self._send is not None:
            found |= {"request_ring_free_bytes": self._outbox.room(), "reply_bytes_reserved": self._reply_room.reserved}
            found |= {"reply_bytes": self._reply_room.capacity}
        return found

    def whereabouts(self, group: int, member: int) -> str:
        """Of the trajectory's request: what would end it."""
        if self._send is None:
            return f"sampler {self.index} is being replaced, and computes it then"
        if any((request.group, request.member) == (group, member) for request in self._sent.values()):
            return f"ended by sampler {self.index}, which has it"
        return f"in line for sampler {self.index}: max_sample_requests and its queue let {len(self._sent)} in for now"

    def connect(
        self, send: Callable[[Message], None], requests: QueueProducer, replies: QueueConsumer, room: int
    ) -> None:
        """Speak to a new incarnation; whatever the one before had not answered is asked again, oldest first."""
        self.disconnect()
        self._send = send
        self._outbox = Outbox(requests, send, f"sampler {self.index}")
        self._replies = replies
        self._reply_room = ReplyRoom(room)
        self.flush()

    def disconnect(self) -> None:
        """The incarnation is gone: its requests wait again."""
        self._send = None
        if self._large is not None:
            self._large.cancel()
            self._large = None
        for request in self._sent.values():
            self._limit.give_back()
            self._push(request)
        self._sent.clear()
        after, self._after = self._after, {}
        for then in after.values():
            then()
        self._released.clear()
        self._versions.clear()

    def generate(
        self,
        *,
        priority: Priority,
        group: int,
        member: int,
        pick: Callable[[], Pick],
        context: list[int],
        max_tokens: int,
        generated: int,
    ) -> asyncio.Future[SegmentResult]:
        """Ask for one segment after `context`. Lower `priority` goes first when requests must wait.

        `pick` is called once, when the request leaves; a restarted sampler is asked for the same version again.
        """
        future = asyncio.get_running_loop().create_future()
        self._numbers += 1
        request = _Request(
            priority, self._numbers, group, member, pick, array("i", context), max_tokens, generated, future
        )
        self._push(request)
        self._flush_soon()
        return future

    def withdraw(self, group: int, member: int) -> None:
        """The trajectory is to end: its request, if it has not left yet, is answered with no tokens."""
        for *_, request in self._waiting:
            if (request.group, request.member) == (group, member) and not request.future.done():
                version = -1 if request.picked is None else request.picked.version
                request.future.set_result(SegmentResult([], [], version, version, 0, False, 0.0, 0.0))

    def release(self, group: int, member: int, then: Callable[[], None]) -> None:
        """The trajectory has ended; its KV may go. `then` is called when the sampler computes nothing of it any more.

        That is at once, unless a request of it is there unanswered.
        """
        if self._send is not None:
            self._released.append([group, member])
            self._flush_soon()
        for number, request in self._sent.items():
            if (request.group, request.member) == (group, member):
                self._after[number] = then
                return
        then()

    def release_version(self, version: int) -> None:
        """Nobody leases `version` any more."""
        if self._send is not None:
            self._versions.append(version)
            self._flush_soon()

    def fail(self, error: Exception) -> None:
        """The run is over: whoever waits gets `error`."""
        self.disconnect()  # what was sent waits again
        requests = [request for *_, request in self._waiting]
        self._waiting.clear()
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error)

    def receive(self, message: Message) -> None:
        """A message of the sampler; ignored once the run has failed."""
        if self._send is None:
            return
        if isinstance(message, Segments):
            for segment in message.segments:
                data = memoryview(self._replies.read(segment.position, BYTES_PER_REPLY_TOKEN * segment.num_tokens))
                request = self._sent.pop(segment.request)
                self._reply_room.release(BYTES_PER_REPLY_TOKEN * request.max_tokens)
                self._limit.give_back()
                if not request.future.done():  # cancelled with its run
                    split = BYTES_PER_TOKEN * segment.num_tokens
                    result = SegmentResult(
                        data[:split].cast("i").tolist(),
                        data[split:].cast("f").tolist(),
                        segment.version,
                        segment.kv_version,
                        segment.cached,
                        segment.stopped,
                        segment.seconds,
                        segment.queue_seconds,
                        segment.evictions,
                        segment.dropped,
                    )
                    request.future.set_result(result)
                if segment.request in self._after:
                    self._after.pop(segment.request)()
        if isinstance(message, Segments | Consumed):
            self._outbox.note_consumed(message.consumed)
            for wake in self._limit.wake:
                wake()

    def _push(self, request: _Request) -> None:
        """Oldest admission first, then the order of asking."""
        heapq.heappush(self._waiting, (request.priority, request.number, request))

    def _flush_soon(self) -> None:
        """Everything asked for in this tick of the loop goes out in one message."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        try:
            self.flush()
        except Exception as error:  # a callback of the loop is an outermost frame
            self._on_error(error)

    def flush(self) -> None:
        """Send what fits now: the request's context into its queue, with room for the whole of its reply reserved."""
        self._flush_due = False
        if self._send is None:
            return
        if self._released or self._versions:
            self._send(Release(trajectories=self._released, versions=self._versions, consumed=self._replies.consumed))
            self._released, self._versions = [], []
        batch: list[GenerateRequest] = []
        while self._waiting and self._large is None:
            request = self._waiting[0][-1]
            if request.future.done():  # cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            num_bytes = BYTES_PER_TOKEN * len(request.context)
            large = num_bytes > self._outbox.largest_piece
            if not large and self._outbox.room() < num_bytes:
                break
            if not self._limit.take():
                break
            if not self._reply_room.reserve(BYTES_PER_REPLY_TOKEN * request.max_tokens):
                self._limit.give_back()
                break
            heapq.heappop(self._waiting)
            if request.picked is None:
                request.picked = request.pick()
            self._sent[request.number] = request
            if large:
                self._large = asyncio.get_running_loop().create_task(self._send_large(request))
            else:
                batch.append(request.header(self._outbox.write(request.context)))
        if batch:
            self._send(Generate(requests=batch, consumed=self._replies.consumed))

    async def _send_large(self, request: _Request) -> None:
        """A context larger than a piece: the others wait behind it, so that pieces never mix."""
        try:
            position = await self._outbox.put(request.context)
        except QueueError as error:  # the sampler has read nothing for very long
            self._large = None
            if not request.future.done():
                request.future.set_exception(error)
            return
        assert position == IN_PIECES, "only contexts larger than a piece come here"
        self._send(Generate(requests=[request.header(position)], consumed=self._replies.consumed))
        if request.future.done():  # cancelled on its way: what was told then came before it
            self._released.append([request.group, request.member])
        self._large = None
        self._flush_now()
