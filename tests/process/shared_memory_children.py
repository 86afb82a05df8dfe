"""The other processes of test_shared_memory.py and test_cuda_weights.py: `shared_memory_children.py ROLE ARGUMENT…`.

Each reports on its last line of output; a failed check ends it with an exit status that is not 0.
"""

import json
import os
import resource
import sys
import time
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from shm.block import Block
from shm.errors import BlockError
from shm.ledger import Ledger, LedgerShape, State
from shm.queue import QueueConsumer, QueueProducer

NUM_RESERVATIONS = 500  # a long record: writing it takes long enough to be caught in the middle
SHAPE = LedgerShape(num_slots=2, num_reservations=NUM_RESERVATIONS, num_workers=1)
LEAD = 50
WAIT_SECONDS = 60.0


def reservations_of(epoch: int) -> list[tuple[int, int]]:
    """A table in which every word tells its epoch; its length differs from epoch to epoch."""
    return [(epoch * NUM_RESERVATIONS + place, epoch) for place in range(NUM_RESERVATIONS - epoch % 7)]


def echo(path: str, num_bytes: str) -> None:
    """Check what the maker wrote, answer in place."""
    with Block.open(path, int(num_bytes)) as block:
        assert block.view[0] == 1 and block.view[-1] == 2, bytes(block.view[:1])
        block.view[:4] = b"pong"
    print("answered")


class SlowLedger(Ledger):
    """Stores a record word by word, so that a reader on another processor has every chance to meet it half written.

    The real one copies a record at once, within a few hundred nanoseconds: too short to be met in a test.
    """

    def _write(self, start: int, values: Sequence[int]) -> None:
        shared = self._words
        self._words = memoryview(array("q", bytes(shared.nbytes)))
        super()._write(start, values)
        written, self._words = self._words, shared
        for word in range(start, start + len(values) + 1):
            shared[word] = written[word]


def hammer(path: str, num_epochs: str) -> None:
    """Write reservations and slots as fast as possible, up to LEAD epochs ahead of what the reader says it has seen.

    It says so in the lease word of slot 0; so both really run at the same time, however the machine schedules them.
    """
    with Block.open(path, SHAPE.num_bytes) as block:
        ledger = SlowLedger(block.view, SHAPE)
        ledger.attach()
        for epoch in range(1, int(num_epochs) + 1):
            deadline = time.monotonic() + WAIT_SECONDS
            while epoch - ledger.read_lease(0) > LEAD:
                assert time.monotonic() < deadline, f"the reader stands still at epoch {ledger.read_lease(0)}"
                os.sched_yield()
            ledger.write_reservations(epoch, reservations_of(epoch))
            ledger.write_slot(1, epoch, State(epoch % 3), 3 * epoch)
    print("wrote", num_epochs)


def hold(num_bytes: str) -> None:
    """Make blocks of every kind, say so, and stay until killed."""
    blocks = [Block.create(f"held-{index}", int(num_bytes), fill=0xFF) for index in range(3)]
    opened = Block.open(blocks[0].path, int(num_bytes))
    opened.view[0] = 5
    print(json.dumps([block.path for block in blocks]), flush=True)
    sys.stdin.read()


def too_large(limit: str) -> None:
    """Ask for more than there is, four ways; each must raise, and none may end the process with a signal."""
    reports = []
    for name, num_bytes in (("more than the machine has", 1 << 50), ("more than an address", 1 << 62)):
        try:
            Block.create(name, num_bytes)
        except BlockError as error:
            reports.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        Block.create("more than the limit", int(limit) + 1)
    except BlockError as error:
        reports.append(str(error))
    with Block.create("enough", int(limit), fill=0xFF) as block:  # every page can be written
        assert block.view[-1] == 0xFF
    assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")  # three standard ones and this listing
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 24), resource.RLIM_INFINITY))
    try:
        Block.create("more than the addresses", 1 << 26)
    except BlockError as error:
        reports.append(str(error))
    print(json.dumps(reports))


def answer(fd: str, requests_path: str, replies_path: str, capacity: str) -> None:
    """A worker: reads requests, answers each with its bytes reversed, never waits for room. Ends at a null header."""
    connection = Connection(int(fd))
    with Block.open(requests_path, int(capacity)) as requests, Block.open(replies_path, int(capacity)) as replies:
        consumer, producer = QueueConsumer(requests.view), QueueProducer(replies.view)
        num_answered, reported, smallest_room = 0, 0, producer.room()
        while True:
            assert connection.poll(WAIT_SECONDS), "no message from the supervisor"
            message = json.loads(connection.recv_bytes())
            if message is None:
                break
            number, position, length, consumed = message
            producer.release(consumed)
            data = consumer.read(position, length)
            position = producer.write(data[::-1])  # QueueError if there were no room
            smallest_room = min(smallest_room, producer.room())
            num_answered += 1
            reported = consumer.consumed
            connection.send_bytes(json.dumps([number, position, length, reported]).encode())
    print(json.dumps({"answered": num_answered, "smallest_room": smallest_room}))


def cuda_reader(device: str) -> None:
    """Open CUDA slots from fields on standard input; report what they hold, then write to the last one."""
    import msgpack
    import torch

    from shm.weights import open_slots

    fields = msgpack.unpackb(sys.stdin.buffer.read())
    dtype = getattr(torch, fields["handles"][0]["dtype"])
    slots = open_slots(fields, fields["handles"][0]["num_elements"], dtype, device)
    report = {
        "checksums": [slots.checksum(slot) for slot in range(slots.num_slots)],
        "first": slots.flat(0)[:4].tolist(),
        "device": str(slots.flat(0).device),
        "in_place": slots.in_place,
    }
    slots.flat(slots.num_slots - 1).fill_(3.0)
    torch.cuda.synchronize()
    slots.close()
    print(json.dumps(report))


if __name__ == "__main__":
    roles = {role.__name__: role for role in (echo, hammer, hold, too_large, answer, cuda_reader)}
    roles[sys.argv[1]](*sys.argv[2:])
