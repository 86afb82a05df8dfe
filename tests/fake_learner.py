"""The learner's part of a checkpoint without a learner, for tests of the supervisor's part."""

import asyncio
import os
import time
from pathlib import Path

from pipeline.checkpoints.checkpoints import Checkpoints
from pipeline.checkpoints.saved import find_checkpoints
from pipeline.config import Checkpointing
from pipeline.run_dir.events import EventLog
from workers.model_files.checksum import checksum_of
from workers.model_files.tensor_files import OPTIMIZER, SINGLE

FILES = {"config.json": b"{}", "more/notes.txt": b"x"}
WRITTEN = {SINGLE, OPTIMIZER, "config.json", "more/notes.txt", "state.msgpack", "complete.msgpack"}


class FakeRun:
    """Its files tell the version."""

    async def save_weights(self, version: int, path: str, optimizer_path: str) -> tuple[int, int]:
        weights, optimizer = b"weights of %d" % version, b"optimizer of %d" % version
        Path(path).write_bytes(weights)
        Path(optimizer_path).write_bytes(optimizer)
        return checksum_of(weights), checksum_of(optimizer)


def open_checkpoints(run_dir: Path, files=FILES, **options) -> Checkpoints:
    """Of a run in `run_dir`; options: of Checkpointing."""
    events = EventLog(run_dir / "events.jsonl", time.monotonic)
    return Checkpoints(run_dir, files, events, Checkpointing(**options), learner_bytes=1000)


def save(made, version, run=None, **options):
    asyncio.run(made.save(run or FakeRun(), version, {"journal": version, "of": version}, **options))


def versions(run_dir):
    """Of the complete ones, newest first, each with all that was written of its version."""
    found, broken = find_checkpoints(run_dir)
    assert not broken
    for one in found:
        assert set(one.marker.files) | {"complete.msgpack"} == WRITTEN
        assert (one.path / "model.safetensors").read_bytes() == b"weights of %d" % one.version
        one.check_contents()
        assert one.state()["of"] == one.version == one.journal
    return [one.version for one in found]


def entries(run_dir):
    return sorted(os.listdir(run_dir / "checkpoints"))
