"""A sampler that is played by the test: it takes what a `SamplerClient` sends, and answers when told to."""

import asyncio
from array import array

from pipeline.processes.sampler.sampler_client import Pick
from shm.queue import QueueConsumer, QueueProducer
from workers.messages import Generate, Payload, Release, Segment, Segments
from workers.transfer import Inbox

REQUEST_BYTES = 4096  # contexts larger than 1024 bytes, 256 tokens, go in pieces
REPLY_BYTES = 8192  # room for 1024 tokens of replies


class FakeSampler:
    """One incarnation: takes what the client sends, and answers when told to."""

    def __init__(self, client, request_bytes=REQUEST_BYTES, reply_bytes=REPLY_BYTES):
        requests, replies = (memoryview(bytearray(size)) for size in (request_bytes, reply_bytes))
        self.client = client
        self.inbox = Inbox(QueueConsumer(requests))
        self.replies = QueueProducer(replies)
        self.open = {}  # request number -> GenerateRequest
        self.contexts = {}  # request number -> token ids
        self.messages = []  # kinds, in order
        self.released = []
        client.connect(self.take, QueueProducer(requests), QueueConsumer(replies), reply_bytes)

    def take(self, message):
        self.messages.append(type(message))
        if getattr(message, "consumed", 0):
            self.replies.release(message.consumed)
        if isinstance(message, Payload):
            self.inbox.add_piece(message)
        elif isinstance(message, Generate):
            for request in message.requests:
                assert request.request not in self.open, "asked twice of one incarnation"
                data = self.inbox.take(request.position, 4 * request.num_tokens)
                self.open[request.request] = request
                self.contexts[request.request] = array("i", bytes(data)).tolist()
        elif isinstance(message, Release):
            self.released.append((message.trajectories, message.versions))

    def answer(self, number, tokens=(7, 8)):
        request = self.open.pop(number)
        logprobs = array("f", [-0.5 * (index + 1) for index in range(len(tokens))])
        position = self.replies.write(array("i", tokens), logprobs)
        segment = Segment(number, request.version, request.version - 1, position, len(tokens), 3, True, 0.25, 0.5, 1, 2)
        self.client.receive(Segments(segments=[segment], consumed=self.inbox.consumed))

    def report(self):
        """What the worker's loop sends when it has read enough."""
        report = self.inbox.report()
        if report is not None:
            self.client.receive(report)


def give_up(error):
    raise error


async def tick():
    for _ in range(3):
        await asyncio.sleep(0)


def ask(client, priority=0, group=0, member=0, context=(1, 2, 3), max_tokens=16, generated=0):
    return client.generate(
        priority=priority,
        group=group,
        member=member,
        pick=lambda: Pick(5, 1, 2),
        context=list(context),
        max_tokens=max_tokens,
        generated=generated,
    )


def run(test):
    return asyncio.run(asyncio.wait_for(test, 30))
