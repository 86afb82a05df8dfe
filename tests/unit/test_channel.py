"""Links in one process and across two: everything arrives, once and in order, or is dropped on purpose."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import zmq

from workers.channel import SupervisorLink, WorkerChannel
from workers.errors import ChannelError, MessageError
from workers.message_codec import encode
from workers.messages import Consumed, Failed, Hello, Stop

ROOT = Path(__file__).parent.parent.parent
BURST = 20_000
SECONDS = 60.0  # bound on every wait

# A worker that sends every number on, and ends with `Stop`; it begins to read only when the file in argv[2] is there,
# so that a whole burst waits in the sockets.
ECHO = f"""
import os, sys, time
from workers.channel import WorkerChannel
from workers.messages import Hello, Stop

channel = WorkerChannel(sys.argv[1], 3)
channel.send(Hello(role="echo", pid=os.getpid()))
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
while not isinstance(message := channel.receive({SECONDS}), Stop):
    channel.send(message)
channel.close()
"""


@pytest.fixture
def endpoint():
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as directory:
        yield f"ipc://{directory}/link"


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def link(context, endpoint):
    link = SupervisorLink(context, endpoint, 3, "sampler 0")
    yield link
    link.close()


@pytest.fixture
def channel(link, endpoint):
    channel = WorkerChannel(endpoint, 3)
    channel.send(Hello(role="sampler", pid=1))
    collect(link, 1)  # connected
    yield channel
    channel.close()


def collect(link, count, act=lambda: None):
    """Attach the link, act, and return the next `count` messages."""

    async def run():
        received, enough = [], asyncio.Event()

        def take(message):
            received.append(message)
            if len(received) == count:
                enough.set()

        link.attach(take, take)
        act()
        try:
            await asyncio.wait_for(enough.wait(), SECONDS)
        finally:
            link.detach()
        return received

    return asyncio.run(run())


def test_messages_arrive_in_order_both_ways(link, channel):
    sent = [Consumed(consumed=number) for number in range(100)]
    for message in sent:
        link.send(message)
    assert [channel.receive(SECONDS) for _ in sent] == sent
    for message in sent:
        channel.send(message)
    assert collect(link, 100) == sent


def test_receive_waits_no_longer_than_told(channel):
    assert channel.receive(0.0) is None
    assert channel.receive(0.01) is None


def test_what_arrives_while_detached_waits(link, channel):
    channel.send(Consumed(consumed=1))
    assert collect(link, 1) == [Consumed(consumed=1)]
    channel.send(Consumed(consumed=2))
    channel.send(Consumed(consumed=3))
    assert collect(link, 2) == [Consumed(consumed=2), Consumed(consumed=3)]


def test_answers_during_delivery_are_delivered_too(link, channel):
    """The descriptor tells edges only: what arrives while a message is handled must not be overlooked."""
    received = []

    async def run():
        done = asyncio.Event()

        def take(message):
            received.append(message.consumed)
            if message.consumed == 200:
                done.set()
                return
            link.send(Consumed(consumed=message.consumed))
            channel.send(Consumed(consumed=channel.receive(SECONDS).consumed + 1))

        link.attach(take, take)
        channel.send(Consumed(consumed=0))
        await asyncio.wait_for(done.wait(), SECONDS)
        link.detach()

    asyncio.run(run())
    assert received == list(range(201))


def test_send_without_a_peer_drops(link, endpoint):
    """Before a worker is up, and after it is gone; nothing old reaches the next one."""
    for _ in range(1000):
        link.send(Stop())
    channel = WorkerChannel(endpoint, 3)
    channel.send(Hello(role="sampler", pid=1))
    collect(link, 1)
    link.send(Consumed(consumed=7))
    assert channel.receive(SECONDS) == Consumed(consumed=7)
    channel.close()


def test_message_for_another_incarnation_is_refused_by_the_worker(link, channel):
    link.incarnation = 4
    link.send(Stop())
    with pytest.raises(MessageError, match="A Stop for incarnation 4 reached 3"):
        channel.receive(SECONDS)


def test_message_of_another_incarnation_is_ignored_by_the_supervisor(link, channel):
    for incarnation, consumed in ((2, 1), (3, 2), (4, 3), (3, 4)):
        channel._socket.send(encode(Consumed(consumed=consumed), incarnation))
    assert collect(link, 2) == [Consumed(consumed=2), Consumed(consumed=4)]


@pytest.mark.parametrize("end", ["link", "channel"])
def test_another_thread_is_refused(link, channel, end):
    errors = []

    def use():
        try:
            {"link": link, "channel": channel}[end].send(Stop())
        except ChannelError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "thread that did not make it" in errors[0]


def test_closed_link_refuses_and_leaves_no_file(link, endpoint):
    path = endpoint.removeprefix("ipc://")
    assert os.path.exists(path)
    link.close()
    link.close()
    assert not os.path.exists(path)
    with pytest.raises(ChannelError, match="The link to sampler 0 is closed"):
        link.send(Stop())


def test_last_words_are_handed_over_by_close(link, endpoint):
    channel = WorkerChannel(endpoint, 3)
    sent = [Failed(why=f"{number} " + "x" * 10_000, is_final=False) for number in range(50)]
    for message in sent:
        channel.send(message)
    channel.close()
    channel.close()
    assert collect(link, 50) == sent


def test_burst_to_a_process_that_does_not_read_is_neither_lost_nor_blocked_on(link, endpoint, tmp_path):
    go = tmp_path / "go"
    worker = subprocess.Popen([sys.executable, "-c", ECHO, endpoint, str(go)], cwd=ROOT)
    try:
        assert [type(message) for message in collect(link, 1)] == [Hello]

        def send():
            for number in range(BURST):
                link.send(Consumed(consumed=number))
            go.touch()

        assert [message.consumed for message in collect(link, BURST, send)] == list(range(BURST))
        link.send(Stop())
        assert worker.wait(SECONDS) == 0
    finally:
        worker.kill()
        worker.wait()


def test_send_to_a_dead_process_drops(link, endpoint, tmp_path):
    worker = subprocess.Popen([sys.executable, "-c", ECHO, endpoint, str(tmp_path / "never")], cwd=ROOT)
    collect(link, 1)
    worker.kill()
    worker.wait()
    for _ in range(1000):
        link.send(Stop())  # does not raise, does not block
    link.close()


def test_error_in_a_delivery_is_handed_over_and_the_messages_behind_it_still_come(link, channel):
    """One message can't be decoded, one is not taken by its receiver."""
    errors, received = [], []

    async def run():
        done = asyncio.Event()

        def take(message):
            if message.consumed == 2:
                raise KeyError("two")
            received.append(message.consumed)
            if message.consumed == 3:
                done.set()

        link.attach(take, errors.append)
        channel.send(Consumed(consumed=1))
        channel._socket.send(b"no message")
        for number in (2, 3):
            channel.send(Consumed(consumed=number))
        try:
            await asyncio.wait_for(done.wait(), SECONDS)
        finally:
            link.detach()

    asyncio.run(run())
    assert received == [1, 3]
    assert [type(error) for error in errors] == [MessageError, KeyError]


def test_sockets_are_their_users_alone(link, endpoint):
    assert stat.S_IMODE(os.stat(endpoint.removeprefix("ipc://")).st_mode) == 0o600
