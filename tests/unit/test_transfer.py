"""Payloads through a small ring: whole, in pieces, waiting for room, with reports that keep both sides going."""

import asyncio

import pytest

from shm.errors import QueueError
from shm.queue import QueueConsumer, QueueProducer
from workers import transfer
from workers.messages import Consumed, Payload
from workers.transfer import IN_PIECES, Inbox, Outbox

CAPACITY = 64  # bytes; the largest piece is 16, a report is due after 16


class Pair:
    """An outbox and its inbox over one ring, with the messages between them in a list."""

    def __init__(self):
        view = memoryview(bytearray(CAPACITY))
        self.producer = QueueProducer(view)
        self.sent = []
        self.outbox = Outbox(self.producer, self.sent.append, "sampler 0")
        self.inbox = Inbox(QueueConsumer(view))

    def take_pieces(self):
        """Let the worker read the pieces sent so far; returns their lengths."""
        pieces, self.sent[:] = list(self.sent), []
        for piece in pieces:
            assert isinstance(piece, Payload)
            self.inbox.add_piece(piece)
        return [piece.length for piece in pieces]


@pytest.fixture
def pair():
    return Pair()


def test_small_payload_goes_whole_with_its_parts_end_to_end(pair):
    async def put():
        return await pair.outbox.put(b"abc", memoryview(b"defg"), b"")

    position = asyncio.run(put())
    assert position == 0 and pair.sent == []
    assert pair.inbox.take(position, 7) == b"abcdefg"


def test_payload_of_exactly_the_largest_piece_goes_whole(pair):
    async def put():
        return await pair.outbox.put(bytes(16))

    assert asyncio.run(put()) == 0 and pair.sent == []


def test_a_transfer_that_is_cancelled_as_there_is_room_again_sends_no_more(pair):
    """A sampler's last message frees room, and its death, seen in the same tick, cancels what was on its way to it."""

    async def run():
        putting = asyncio.ensure_future(pair.outbox.put(bytes(150)))
        await asyncio.sleep(0)
        assert pair.take_pieces() == [16] * 4
        pair.outbox.note_consumed(pair.inbox.consumed)
        putting.cancel()
        await asyncio.wait([putting], timeout=10.0)
        return putting.cancelled()

    assert asyncio.run(run()) and pair.sent == []


def test_larger_payload_goes_in_pieces_and_waits_for_the_reader(pair):
    """150 bytes through a ring of 64: ten pieces, never more than four of them unread."""
    data = bytes(range(150))

    async def transfer():
        putting = asyncio.ensure_future(pair.outbox.put(data[:100], data[100:]))
        lengths = []
        while not putting.done():
            await asyncio.sleep(0)
            assert len(pair.sent) <= 4
            lengths += pair.take_pieces()
            report = pair.inbox.report()
            if report is not None:
                pair.outbox.note_consumed(report.consumed)
        return await putting, lengths + pair.take_pieces()

    position, lengths = asyncio.run(asyncio.wait_for(transfer(), 30))
    assert position == IN_PIECES
    assert lengths == [16] * 9 + [6]
    assert pair.inbox.take(IN_PIECES, 150) == data
    with pytest.raises(QueueError, match="arrived as pieces of 0 bytes"):  # they were taken
        pair.inbox.take(IN_PIECES, 150)


def test_put_waits_until_the_reader_reports(pair):
    async def transfer():
        positions = [await pair.outbox.put(bytes([number]) * 16) for number in range(4)]
        waiting = asyncio.ensure_future(pair.outbox.put(b"last"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done() and pair.outbox.room() == 0
        assert pair.inbox.take(positions[0], 16) == bytes(16)
        assert not waiting.done()  # read, but not told
        pair.outbox.note_consumed(pair.inbox.consumed)
        return await waiting

    assert asyncio.run(asyncio.wait_for(transfer(), 30)) == 64


def test_reader_that_never_reads_is_named(pair, monkeypatch):
    monkeypatch.setattr(transfer, "ROOM_SECONDS", 0.01)

    async def fill():
        for _ in range(4):
            await pair.outbox.put(bytes(16))
        await pair.outbox.put(b"more")

    with pytest.raises(QueueError, match=r"sampler 0 has read nothing from its queue for 0.01 s while 4 bytes wait"):
        asyncio.run(fill())


def test_pieces_that_do_not_add_up_are_an_error(pair):
    pair.inbox.add_piece(Payload(position=pair.producer.write(b"abc"), length=3))
    with pytest.raises(QueueError, match="A payload of 4 bytes arrived as pieces of 3 bytes"):
        pair.inbox.take(IN_PIECES, 4)


def test_report_is_due_after_a_quarter_of_the_ring_and_once(pair):
    pair.inbox.take(pair.producer.write(bytes(15)), 15)
    assert pair.inbox.report() is None
    pair.inbox.take(pair.producer.write(bytes(1)), 1)
    assert pair.inbox.report() == Consumed(consumed=16)
    assert pair.inbox.report() is None


def test_number_on_another_message_counts_as_a_report(pair):
    pair.inbox.take(pair.producer.write(bytes(16)), 16)
    assert pair.inbox.consumed == 16
    assert pair.inbox.report() is None


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 1000])
def test_any_length_arrives_through_a_ring_that_wraps(pair, length):
    """Three payloads one after the other, so that all but the shortest wrap round the end."""

    async def transfer():
        for number in range(3):
            data = bytes((number + index) % 251 for index in range(length))
            putting = asyncio.ensure_future(pair.outbox.put(data))
            while not putting.done():
                await asyncio.sleep(0)
                pair.take_pieces()
                pair.outbox.note_consumed(pair.inbox.consumed)
            pair.take_pieces()
            assert pair.inbox.take(await putting, length) == data
            pair.outbox.note_consumed(pair.inbox.consumed)

    asyncio.run(asyncio.wait_for(transfer(), 30))
    assert pair.outbox.room() == CAPACITY


def test_waiting_put_ends_at_once_when_the_reader_is_dead(pair):
    async def transfer():
        waiting = asyncio.ensure_future(pair.outbox.put(bytes(100)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(pair.sent) == 4 and not waiting.done()
        pair.outbox.fail(RuntimeError("It is dead."))
        await waiting

    with pytest.raises(RuntimeError, match="It is dead"):
        asyncio.run(asyncio.wait_for(transfer(), 30))
