"""Blocks, ledger and queues between real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from shared_memory_children import LEAD, SHAPE, WAIT_SECONDS, reservations_of

from shm.block import Block
from shm.errors import BlockError
from shm.ledger import Ledger, State
from shm.queue import QueueConsumer, QueueProducer, ReplyRoom
from tests.shared_files import shared_memory_files

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments, **options):
    """A child of shared_memory_children.py; its output is text."""
    command = [sys.executable, str(Path(__file__).with_name("shared_memory_children.py")), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes, **options)


def finish(child):
    """Wait for a child and return its last line; its failure is the test's."""
    output, errors = child.communicate(timeout=WAIT_SECONDS)
    assert child.returncode == 0, f"exit status {child.returncode}\n{output}{errors}"
    return output.splitlines()[-1]


@pytest.fixture
def end():
    """Children put in here do not outlive the test, however it ends."""
    children = []
    yield children.append
    for child in children:
        child.kill()
        child.communicate()


def test_another_process_opens_a_block_by_its_path_and_answers_in_it(end):
    with Block.create("echo", 100_000) as block:
        block.view[0], block.view[-1] = 1, 2
        end(child := start("echo", block.path, 100_000))
        assert finish(child) == "answered"
        assert bytes(block.view[:4]) == b"pong" and block.view[-1] == 2


def test_a_reader_never_sees_a_mixed_record_of_a_hammering_writer(end):
    num_epochs = 3_000
    with Block.create("ledger", SHAPE.num_bytes, fill=0xFF) as block:
        ledger = Ledger(block.view, SHAPE)
        ledger.format(run_id=1)
        end(child := start("hammer", block.path, num_epochs))
        last, num_epochs_seen, slot_version = 0, 0, -1
        while last < num_epochs or slot_version < num_epochs:
            assert child.poll() in (None, 0), child.communicate()
            epoch, owed = ledger.reservations(last)  # an epoch that went back would raise
            assert owed == (reservations_of(epoch) if epoch else [])
            num_epochs_seen += epoch > last
            last = epoch
            ledger.write_lease(0, epoch)
            slot = ledger.slot(1)
            assert slot.version >= slot_version
            if slot.version > 0:
                assert (slot.state, slot.checksum) == (State(slot.version % 3), 3 * slot.version)
            slot_version = slot.version
        assert finish(child) == f"wrote {num_epochs}"
        assert num_epochs_seen >= num_epochs // LEAD


def test_nothing_is_left_of_a_killed_maker_but_what_others_have_mapped(end):
    num_bytes = 1 << 20
    before = shared_memory_files()
    end(child := start("hold", num_bytes))
    paths = json.loads(child.stdout.readline())
    opened = Block.open(paths[0], num_bytes)
    child.send_signal(signal.SIGKILL)
    assert child.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert shared_memory_files() <= before
    for path in paths:
        with pytest.raises(BlockError, match="cannot be opened"):
            Block.open(path, num_bytes)
    assert (opened.view[0], opened.view[1], opened.view[-1]) == (5, 0xFF, 0xFF)  # alive until its last user goes
    opened.view[-1] = 7
    opened.close()


def test_too_large_a_block_is_an_error_and_never_a_signal(end):
    limit = 1 << 20
    end(child := start("too_large", limit))
    machine, address, file_limit, addresses = json.loads(finish(child))
    assert "'more than the machine has' needs 1125899906842624 bytes" in machine
    assert "'more than an address' needs 4611686018427387904 bytes" in address
    assert f"'more than the limit' needs {limit + 1} bytes, and a file of this process may have {limit};" in file_limit
    assert "'more than the addresses' needs 67108864 bytes" in addresses  # what ulimit -v leaves, not the machine
    assert int(addresses.partition(" and ")[2].split()[0]) < 1 << 25


def test_two_processes_with_full_queues_facing_each_other_finish(end):
    capacity, length, num_requests = 4096, 1000, 300
    ours, theirs = socket.socketpair()
    with (
        Block.create("requests", capacity, fill=0xFF) as requests,
        Block.create("replies", capacity, fill=0xFF) as replies,
    ):
        producer, consumer = QueueProducer(requests.view), QueueConsumer(replies.view)
        room = ReplyRoom(capacity)
        connection = Connection(ours.detach())
        backlog = deque(
            (number, bytes((number + place) % 256 for place in range(length))) for number in range(num_requests)
        )
        sent = {}

        def send_what_fits():
            while backlog and producer.room() >= length and room.reserve(length):
                number, data = backlog.popleft()
                sent[number] = data
                header = [number, producer.write(data), length, consumer.consumed]
                connection.send_bytes(json.dumps(header).encode())

        send_what_fits()
        assert len(sent) == 4 and producer.room() < length  # this way is full before the worker runs …
        end(
            child := start("answer", theirs.fileno(), requests.path, replies.path, capacity, pass_fds=[theirs.fileno()])
        )
        theirs.close()
        while sent:
            assert connection.poll(WAIT_SECONDS), "no answer from the worker"
            number, position, num_bytes, consumed = json.loads(connection.recv_bytes())
            producer.release(consumed)
            assert consumer.read(position, num_bytes) == sent.pop(number)[::-1]
            room.release(length)
            send_what_fits()
        connection.send_bytes(b"null")
        report = json.loads(finish(child))
        connection.close()
    assert report["answered"] == num_requests
    assert report["smallest_room"] < length  # … and so was the way back: not one more answer would have fitted
    assert room.reserved == 0 and not backlog
