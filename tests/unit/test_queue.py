"""The shared-memory queue's rules, in one process."""

import numpy as np
import pytest

from shm.errors import QueueError
from shm.queue import QueueConsumer, QueueProducer, ReplyRoom


def ring(num_bytes):
    view = memoryview(bytearray(b"\xff" * num_bytes))
    return QueueProducer(view), QueueConsumer(view)


def test_parts_are_read_as_one_payload():
    producer, consumer = ring(64)
    tokens, logprobs = np.array([1, 2, 3], np.int32), np.array([-0.5, -1.0], np.float32)
    position = producer.write(tokens, np.empty(0, np.int32), logprobs, b"end")
    data = consumer.read(position, 23)
    assert np.frombuffer(data, np.int32, 3).tolist() == [1, 2, 3]
    assert np.frombuffer(data, np.float32, 2, offset=12).tolist() == [-0.5, -1.0]
    assert data[20:] == b"end"


def test_a_payload_wraps_round_the_end_and_positions_go_on_counting():
    producer, consumer = ring(10)
    for count in range(20):
        position = producer.write(b"abc", b"defg")
        assert position == 7 * count
        assert consumer.read(position, 7) == b"abcdefg"
        producer.release(consumer.consumed)


def test_room_is_what_the_consumer_has_reported_and_a_full_queue_raises_with_nothing_written():
    producer, consumer = ring(8)
    first = producer.write(b"12345678")
    assert producer.room() == 0
    consumer.read(first, 8)
    with pytest.raises(QueueError, match="payload of 1 bytes .* 0 of 8 bytes free"):
        producer.write(b"x")  # read, but not reported yet
    producer.release(8)
    with pytest.raises(QueueError, match="payload of 9 bytes"):
        producer.write(b"1234", b"56789")
    assert producer.room() == 8
    assert consumer.read(producer.write(b"abcd"), 4) == b"abcd"


def test_the_reader_gets_a_copy():
    producer, consumer = ring(4)
    data = consumer.read(producer.write(b"abcd"), 4)
    producer.release(4)
    producer.write(b"wxyz")
    assert data == b"abcd"


def test_payloads_are_read_in_order_or_not_at_all():
    producer, consumer = ring(16)
    producer.write(b"abcd")
    second = producer.write(b"efgh")
    for position, length in ((second, 4), (0, 17), (0, -1)):
        with pytest.raises(QueueError, match="read in the order"):
            consumer.read(position, length)
    assert consumer.read(0, 4) == b"abcd"
    with pytest.raises(QueueError, match="read in the order"):
        consumer.read(0, 4)


def test_a_consumer_can_not_have_read_less_than_before_nor_more_than_was_written():
    producer, _ = ring(16)
    producer.write(b"abcdefgh")
    producer.release(6)
    producer.release(6)
    for consumed in (5, 9):
        with pytest.raises(QueueError, match=f"has read {consumed} bytes"):
            producer.release(consumed)


def test_a_silent_consumer_becomes_overdue_at_a_quarter():
    producer, consumer = ring(16)
    assert producer.largest_piece == 4
    consumer.read(producer.write(b"abc"), 3)
    assert not consumer.overdue(0)
    consumer.read(producer.write(b"d"), 1)
    assert consumer.overdue(0) and not consumer.overdue(1)


def test_a_queue_without_a_quarter_is_refused():
    with pytest.raises(QueueError, match="too small"):
        QueueProducer(memoryview(bytearray(3)))


def test_reply_room_is_promised_up_to_the_capacity():
    room = ReplyRoom(10)
    assert room.reserve(6) and room.reserve(4)
    assert not room.reserve(1)
    room.release(6)
    assert room.reserved == 4 and room.reserve(1)


def test_reply_room_refuses_what_can_never_be_right():
    room = ReplyRoom(10)
    with pytest.raises(QueueError, match="up to 11 bytes"):
        room.reserve(11)
    room.reserve(3)
    with pytest.raises(QueueError, match="4 bytes of reply room were released, but 3"):
        room.release(4)
