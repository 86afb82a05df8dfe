"""The other processes of test_ipc_cases.py: `ipc_children.py ROLE ARGUMENT…`. Each says on stdout what it has done."""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib

from shm.block import Block
from shm.queue import QueueConsumer, QueueProducer
from workers.channel import WorkerChannel
from workers.messages import Failed
from workers.processes.process import start_kept
from workers.processes.sockets import RUN_FILES, SocketDirectory

HEADER = struct.Struct("<qqqI")  # number, position, length, checksum
CAPACITY = 1 << 16


def attach(path: str, num_bytes: str) -> None:
    """Map a block, and at each line of input say what its first byte is; to the end of the input."""
    with Block.open(path, int(num_bytes)) as block:
        print("attached", flush=True)
        for _ in sys.stdin:
            print(block.view[0], flush=True)


def kill_runs(times: str, base: str) -> None:
    """Runs one after the other, each killed with SIGKILL; in every second one everybody that it knows of is killed,
    too, at once. Says what each had, and what was in `base` when it had started.
    """
    runs = []
    for number in range(int(times)):
        reads, writes = os.pipe()
        pid = os.fork()  # this process has one thread
        if pid == 0:
            try:
                _supervise(number, writes)
            finally:
                os._exit(1)
        os.close(writes)
        with open(reads, encoding="utf-8") as told:
            runs.append(json.loads(told.readline()) | {"in base": sorted(os.listdir(base))})
        for victim in [pid, runs[-1]["keeper"]] if number % 2 else [pid]:
            os.kill(victim, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    print(json.dumps(runs))


def _supervise(number: int, tells: int) -> None:
    """As a supervisor, as far as what it may leave goes: its socket directory with a socket's file, blocks, and a
    process that has started another one.
    """
    sockets = SocketDirectory()
    open(os.path.join(sockets.path, "sampler-0.0"), "x").close()
    blocks = [Block.create(f"slot-{index}", 1 << 20, fill=number) for index in range(3)]
    kept, _ = start_kept(
        ["/bin/sh", "-c", "setsid sleep 1000 & echo $!; wait"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {RUN_FILES: sockets.path},
    )
    child = int(kept.stdout.readline())
    told = {"directory": sockets.path, "keeper": kept.pid, "child": child, "blocks": [block.path for block in blocks]}
    os.write(tells, json.dumps(told).encode() + b"\n")
    time.sleep(1000)


def kill_producers(times: str) -> None:
    """Kill a producer in the middle of its writing, again and again, each with a ring of its own, while another one
    goes on. Every record whose header came must be whole, in order, and of the right producer; says how many came.
    """
    random.seed(0)
    steady = _Producer(0)
    killed_records = steady_records = 0
    for incarnation in range(1, int(times) + 1):
        victim = _Producer(incarnation)
        until = time.monotonic() + random.uniform(0.002, 0.02)
        while time.monotonic() < until or victim.num_read == 0:
            victim.read_one()
            steady.read_one()
        os.kill(victim.pid, signal.SIGKILL)
        os.waitpid(victim.pid, 0)
        while victim.read_one():  # what it had handed over, to the last whole header
            pass
        killed_records += victim.num_read
        before = steady.num_read
        while steady.num_read < before + 3:  # nobody holds it up
            steady.read_one()
        victim.close()
    steady_records = steady.num_read
    os.kill(steady.pid, signal.SIGKILL)
    os.waitpid(steady.pid, 0)
    print(json.dumps({"of killed ones": killed_records, "of the steady one": steady_records}))


class _Producer:
    """A process that writes records into a ring as fast as it can, and our end of it."""

    def __init__(self, incarnation: int) -> None:
        self.num_read = 0
        self._incarnation = incarnation
        self._block = Block.create("replies", CAPACITY, fill=0xFF)
        self._consumer = QueueConsumer(self._block.view)
        headers, writes = os.pipe()
        reads, self._consumed = os.pipe()
        self.pid = os.fork()  # this process has one thread
        if self.pid == 0:
            try:
                _produce(self._block, writes, reads, incarnation)
            finally:
                os._exit(1)
        os.close(writes)
        os.close(reads)
        self._headers = headers

    def read_one(self) -> bool:
        """A record, checked; False at the end of what a killed one has told, a torn header included."""
        data = os.read(self._headers, HEADER.size)
        if len(data) < HEADER.size:
            return False
        number, position, length, checksum = HEADER.unpack(data)
        payload = self._consumer.read(position, length)
        assert number == self.num_read, f"record {number} came in the place of {self.num_read}"
        assert zlib.crc32(payload) == checksum, f"record {number} of producer {self._incarnation} is torn"
        assert payload[0] == self._incarnation % 256, "a record of another producer"
        self.num_read += 1
        try:
            os.write(self._consumed, struct.pack("<q", self._consumer.consumed))
        except BrokenPipeError:  # it is dead already
            pass
        return True

    def close(self) -> None:
        self._block.close()
        os.close(self._headers)
        os.close(self._consumed)


def _produce(block: Block, headers: int, consumed: int, incarnation: int) -> None:
    producer = QueueProducer(block.view)
    random.seed(incarnation)
    number = 0
    while True:
        payload = bytes([incarnation % 256]) + random.randbytes(random.randrange(1, CAPACITY // 4))
        while producer.room() < len(payload):
            producer.release(struct.unpack("<q", os.read(consumed, 8))[0])
        position = producer.write(payload)
        os.write(headers, HEADER.pack(number, position, len(payload), zlib.crc32(payload)))
        number += 1


def answer_nobody(endpoint: str, times: str) -> None:
    """A worker with answers that nobody takes: queue them, then end as workers do. Says how long that took."""
    channel = WorkerChannel(endpoint, 0)
    for _ in range(int(times)):
        channel.send(Failed(why="x" * 10_000, is_final=False))
    print("queued", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    channel.close()
    print(json.dumps(time.monotonic() - began), flush=True)


if __name__ == "__main__":
    roles = {role.__name__: role for role in (attach, kill_runs, kill_producers, answer_nobody)}
    roles[sys.argv[1]](*sys.argv[2:])
