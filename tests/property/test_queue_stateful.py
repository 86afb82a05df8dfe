"""The queue under random writes, reads and wraps against a slow oracle; and the argument in its docstring, played out.

`ConversationMachine` is a supervisor and a worker with a queue each way, and messages that take arbitrarily long: the
worker must have room for every answer it owes, at every moment, and everything must be answered in the end.
"""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shm.errors import QueueError
from shm.queue import QueueConsumer, QueueProducer, ReplyRoom


class RingMachine(RuleBasedStateMachine):
    """One direction. The oracle: a deque of the payloads written and not yet read, and three sums."""

    @initialize(capacity=st.integers(4, 40))
    def make(self, capacity):
        view = memoryview(bytearray(capacity))
        self.capacity = capacity
        self.producer, self.consumer = QueueProducer(view), QueueConsumer(view)
        self.unread = deque()
        self.written = self.read_bytes = self.released = 0

    @rule(parts=st.lists(st.binary(max_size=20), max_size=4))
    def write(self, parts):
        payload = b"".join(parts)
        if len(payload) > self.capacity - (self.written - self.released):
            with pytest.raises(QueueError):
                self.producer.write(*parts)
            return
        assert self.producer.write(*parts) == self.written
        self.unread.append((self.written, payload))
        self.written += len(payload)

    @precondition(lambda self: self.unread)
    @rule()
    def read(self):
        position, payload = self.unread.popleft()
        assert self.consumer.read(position, len(payload)) == payload
        self.read_bytes += len(payload)

    @precondition(lambda self: len(self.unread) > 1 and self.unread[1][0] != self.unread[0][0])
    @rule()
    def read_out_of_order(self):
        position, payload = self.unread[1]
        with pytest.raises(QueueError):
            self.consumer.read(position, len(payload))

    @rule(data=st.data())
    def release(self, data):
        consumed = data.draw(st.integers(self.released, self.read_bytes), "consumed, as of some message")
        self.producer.release(consumed)
        self.released = consumed

    @invariant()
    def room_and_consumed_are_the_oracles(self):
        if hasattr(self, "producer"):
            assert self.producer.room() == self.capacity - (self.written - self.released)
            assert self.consumer.consumed == self.read_bytes


class ConversationMachine(RuleBasedStateMachine):
    """Messages to the worker: (consumed, number, position, length, reply_bytes); back: the same without reply_bytes.

    A number of None: a piece of a large request, which is not answered; back: a message that carries `consumed` alone.
    """

    @initialize(capacity=st.integers(8, 64))
    def make(self, capacity):
        requests, replies = memoryview(bytearray(capacity)), memoryview(bytearray(capacity))
        self.to_worker, self.from_worker = deque(), deque()
        self.requests_out, self.replies_in = QueueProducer(requests), QueueConsumer(replies)
        self.reply_room = ReplyRoom(capacity)
        self.backlog = deque()
        self.reserved = {}  # by number, at the supervisor
        self.num_asked = self.num_answered = 0
        self.requests_in, self.replies_out = QueueConsumer(requests), QueueProducer(replies)
        self.owed = {}  # by number, at the worker
        self.reported = 0

    @rule(data=st.data(), times=st.integers(1, 4))
    def ask(self, data, times):
        for _ in range(times):
            request_bytes = data.draw(st.integers(0, 3 * self.requests_out.capacity), "request bytes")
            reply_bytes = data.draw(st.integers(0, self.reply_room.capacity), "largest reply")
            while request_bytes > self.requests_out.largest_piece:
                self.backlog.append((None, self.requests_out.largest_piece, 0))
                request_bytes -= self.requests_out.largest_piece
            self.backlog.append((self.num_asked, request_bytes, reply_bytes))
            self.num_asked += 1
        self.send_what_fits()

    def send_what_fits(self):
        while self.backlog:
            number, request_bytes, reply_bytes = self.backlog[0]
            if self.requests_out.room() < request_bytes or not self.reply_room.reserve(reply_bytes):
                return
            self.backlog.popleft()
            if number is not None:
                self.reserved[number] = reply_bytes
            position = self.requests_out.write(payload(number, request_bytes))
            self.to_worker.append((self.replies_in.consumed, number, position, request_bytes, reply_bytes))

    @precondition(lambda self: self.to_worker)
    @rule()
    def worker_receives(self):
        consumed, number, position, length, reply_bytes = self.to_worker.popleft()
        self.replies_out.release(consumed)
        assert self.requests_in.read(position, length) == payload(number, length)
        if number is not None:
            self.owed[number] = reply_bytes
        if self.requests_in.overdue(self.reported):
            self.worker_sends(None, 0, 0)

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def worker_answers(self, data):
        number = data.draw(st.sampled_from(sorted(self.owed)), "answered")
        self.answer(number, data.draw(st.integers(0, self.owed[number]), "reply bytes"))

    def answer(self, number, length):
        del self.owed[number]
        position = self.replies_out.write(payload(number, length))  # would raise QueueError if it had to wait
        self.worker_sends(number, position, length)

    def worker_sends(self, number, position, length):
        self.reported = self.requests_in.consumed
        self.from_worker.append((self.reported, number, position, length))

    @precondition(lambda self: self.from_worker)
    @rule()
    def supervisor_receives(self):
        consumed, number, position, length = self.from_worker.popleft()
        self.requests_out.release(consumed)
        if number is not None:
            assert self.replies_in.read(position, length) == payload(number, length)
            self.reply_room.release(self.reserved.pop(number))
            self.num_answered += 1
        self.send_what_fits()

    @invariant()
    def the_worker_has_room_for_every_answer_it_owes(self):
        if hasattr(self, "owed"):
            assert self.replies_out.room() >= sum(self.owed.values())

    def teardown(self):
        """From whatever state: nobody waits for ever. Each round handles a message or an answer, so it ends."""
        if not hasattr(self, "owed"):
            return
        for _ in range(2 * (len(self.backlog) + len(self.to_worker) + self.num_asked) + len(self.from_worker)):
            if self.to_worker:
                self.worker_receives()
            elif self.owed:
                number = min(self.owed)
                self.answer(number, self.owed[number])
            elif self.from_worker:
                self.supervisor_receives()
            self.the_worker_has_room_for_every_answer_it_owes()
        assert self.num_answered == self.num_asked and not self.backlog and self.reply_room.reserved == 0


def payload(number, length):
    return bytes(((number or 0) + place) % 251 for place in range(length))


def test_an_unreserved_reply_can_meet_a_full_queue():
    """Why the account is needed: without it the same conversation stops."""
    machine = ConversationMachine()
    machine.make(capacity=8)
    machine.reply_room = ReplyRoom(1000)  # larger than the ring: promises what is not there
    machine.backlog += [(0, 1, 8), (1, 1, 8)]
    machine.send_what_fits()
    machine.worker_receives()
    machine.worker_receives()
    machine.answer(0, 8)
    with pytest.raises(QueueError):
        machine.answer(1, 8)


TestRing = RingMachine.TestCase
TestConversation = ConversationMachine.TestCase
TestRing.settings = TestConversation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
