"""Whatever bytes a reader of ours is given, it reads them or refuses: no crash, no hang, and no memory that the input
does not have the size for. 1,000,000 inputs in `make soak`.
"""

import os
import pickle
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm import ledger
from tests.hostile_readers import READERS

INPUTS = 200  # of one seed
PEAK_BYTES = 4 << 20  # beside PEAK_PER_BYTE for each of the input's
# msgpack takes up to 8 bytes for each byte of the input, once for each of the lists that begin in one another; and a
# message of an error shows some of what was found.
PEAK_PER_BYTE = 512
SEEDS = st.integers(0, 2**64 - 1)
QUICK = settings(
    max_examples=2, deadline=None, derandomize=False, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Seeds of each reader in `make soak`, 1,000,000 inputs in all: those that need no file are the fast ones.
IN_MEMORY = ("message", "record", "queue", "ledger")
SEEDS_IN_MEMORY, SEEDS_IN_FILES = 1000, 125


@pytest.fixture(autouse=True)
def no_naps(monkeypatch):
    """A torn record of the ledger is read again for a second; here nobody makes it whole meanwhile."""
    monkeypatch.setattr(ledger, "_NAPS", 0)


@pytest.mark.parametrize("name", READERS)
def test_whole_samples_are_read(name, tmp_path):
    for sample in READERS[name].samples:
        READERS[name].read(sample, tmp_path)


@pytest.mark.parametrize("name", READERS)
@QUICK
@given(seed=SEEDS)
def test_hostile_bytes_are_read_or_refused(name, tmp_path, seed):
    feed(name, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_a_million_hostile_inputs_are_read_or_refused(name, tmp_path):
    count = SEEDS_IN_MEMORY if name in IN_MEMORY else SEEDS_IN_FILES
    settings(QUICK, max_examples=count)(given(seed=SEEDS)(lambda seed: feed(name, tmp_path, seed)))()


def test_inputs_are_a_million():
    files = len(READERS) - len(IN_MEMORY)
    assert INPUTS * (len(IN_MEMORY) * SEEDS_IN_MEMORY + files * SEEDS_IN_FILES) >= 1_000_000


def feed(name, directory, seed):
    """`INPUTS` inputs of a seed. Fails with the input that a reader met in another way than by one of its refusals."""
    reader, draws = READERS[name], random.Random(seed)
    inputs = [reader.make(draws, reader.samples) for _ in range(INPUTS)]
    refused, traced = 0, seed % 4 == 0  # to watch the memory takes more time than all else
    if traced:
        tracemalloc.start()
    try:
        for data in inputs:
            if traced:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
            try:
                reader.read(data, directory)
            except reader.refusals as error:
                refused += 1
                assert len(str(error)) < 5000, f"{name} refuses {data[:100].hex()}… at length"
            except Exception as error:
                raise AssertionError(f"{name} meets {data.hex()} with {type(error).__name__}: {error}") from error
            peak = tracemalloc.get_traced_memory()[1] - before if traced else 0
            assert peak < PEAK_BYTES + PEAK_PER_BYTE * len(data), f"{name} takes {peak:,} bytes for {data.hex()}"
    finally:
        if traced:
            tracemalloc.stop()
    assert refused or not reader.refusals, "no input was hostile"


class Payload:
    """What unpickling would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", READERS)
def test_pickles_are_never_run(name, tmp_path):
    trap = tmp_path / "trap"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        try:
            READERS[name].read(pickle.dumps(Payload(trap), protocol), tmp_path)
        except READERS[name].refusals:
            continue
    assert not trap.exists()
    pickle.loads(pickle.dumps(Payload(trap)))
    assert trap.exists(), "the trap works"
