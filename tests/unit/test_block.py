"""Blocks in one process: sizes, lifetime, and what is refused. Other processes: tests/process/test_shared_memory.py."""

import os

import numpy as np
import pytest

from shm import block as block_module
from shm.block import WRONG_LOOKING, Block, available_bytes
from shm.errors import BlockError


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_two_mappings_of_a_block_show_the_same_bytes():
    with Block.create("pair", 10_000) as made, Block.open(made.path, 10_000) as opened:
        assert bytes(opened.view) == bytes(10_000)
        made.view[9_999] = 7
        opened.view[0] = 8
        assert (opened.view[9_999], made.view[0]) == (7, 8)


@pytest.mark.parametrize("num_bytes", [8, (1 << 20) + 8])
def test_a_fresh_block_can_be_filled_with_what_looks_wrong_in_every_dtype(num_bytes):
    with Block.create("fresh", num_bytes, fill=WRONG_LOOKING) as block:
        assert np.isnan(np.frombuffer(block.view, np.float32)).all()
        assert np.isnan(np.frombuffer(block.view, np.float16)).all()
        assert (np.frombuffer(block.view, np.int32) == -1).all()
        assert (np.frombuffer(block.view, np.int64) == -1).all()


def test_close_twice_and_use_after_close():
    block = Block.create("closed", 100)
    block.close()
    block.close()
    with pytest.raises(BlockError, match="closed"):
        _ = block.view
    with pytest.raises(BlockError, match="cannot be opened"):
        Block.open(block.path, 100)


def test_arrays_over_a_closed_block_stay_valid_and_then_free_it():
    before = open_descriptors()
    block = Block.create("kept", 4096)
    array = np.frombuffer(block.view, np.int64)
    block.close()
    array[:] = 5  # would end the process if the mapping were gone
    assert array.sum() == 5 * 512
    del array
    assert open_descriptors() == before


def test_neither_success_nor_failure_leaks_a_descriptor():
    before = open_descriptors()
    with Block.create("one", 100) as block:
        Block.open(block.path, 100).close()
        with pytest.raises(BlockError):
            Block.open(block.path, 101)
    with pytest.raises(BlockError):
        Block.create("huge", 1 << 60)
    assert open_descriptors() == before


def test_a_block_that_does_not_fit_says_what_it_needs_and_what_there_is():
    have = available_bytes()
    with pytest.raises(
        BlockError, match=rf"'slot-0' needs {1 << 50} bytes .* and \d+ bytes .* are available"
    ) as caught:
        Block.create("slot-0", 1 << 50)
    assert have > 0 and isinstance(caught.value, OSError)


def test_a_block_may_not_take_more_than_is_available(monkeypatch):
    monkeypatch.setattr(block_module, "available_bytes", lambda: 4096)
    Block.create("fits", 4096).close()
    with pytest.raises(BlockError, match="needs 4097 bytes .* 4096 bytes"):
        Block.create("too large", 4097)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_an_empty_block_is_refused(num_bytes):
    with pytest.raises(BlockError, match="at least 1"):
        Block.create("empty", num_bytes)


def test_a_block_is_only_opened_in_its_own_size_and_can_not_be_resized():
    with Block.create("sized", 5000) as block:
        for wrong in (4999, 5001):
            with pytest.raises(BlockError, match=f"holds 5000 bytes, not {wrong}"):
                Block.open(block.path, wrong)
        for size in (100, 9000):  # a shrunk block would kill its readers with SIGBUS
            with pytest.raises(PermissionError):
                os.truncate(block.path, size)


def test_a_read_only_view_shows_changes_and_allows_none():
    with Block.create("shown", 64) as block, Block.open(block.path, 64, writable=False) as shown:
        block.view[3] = 9
        assert shown.view[3] == 9
        with pytest.raises(TypeError):
            shown.view[3] = 1


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_groups_limit_counts_when_it_is_smaller(tmp_path, version):
    limit_name, used_name = [("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")][
        version - 1
    ]
    headroom = lambda: block_module._group_headroom(tmp_path, limit_name, used_name)  # noqa: E731
    assert headroom() == block_module._NO_LIMIT  # no such files: the root group
    (tmp_path / used_name).write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 3\n{'total_' if version == 1 else ''}inactive_file 50\n")
    (tmp_path / limit_name).write_text("1000\n")
    assert headroom() == 350
    (tmp_path / used_name).write_text("2000\n")
    assert headroom() == 0
    (tmp_path / limit_name).write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert headroom() == block_module._NO_LIMIT
