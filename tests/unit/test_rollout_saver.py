"""The file of unfinished trajectories has the newest save, whichever thread comes last."""

import asyncio
import errno
import os
from types import SimpleNamespace

import pytest

from pipeline.rollouts.kept_members import pack_file
from pipeline.run_dir.run_files import ROLLOUTS
from pipeline.training.rollout_saver import RolloutSaver
from pipeline.user_warnings import RunWarning


@pytest.fixture
def saver(tmp_path):
    (tmp_path / ROLLOUTS).parent.mkdir()
    saves = iter([[b"first"], [b"second"]])
    return RolloutSaver(
        tmp_path, SimpleNamespace(saved=lambda: next(saves)), SimpleNamespace(sync=lambda: None), every=1.0
    )


def test_an_older_save_that_is_written_late_leaves_the_newer_one(saver, tmp_path):
    first, second = saver.contents(), saver.contents()
    saver.write(second)
    saver.write(first)
    assert (tmp_path / ROLLOUTS).read_bytes() == second.packed == pack_file([b"second"])


def test_one_after_the_other_both_are_written(saver, tmp_path):
    for number in (1, 2):
        contents = saver.contents()
        saver.write(contents)
        assert contents.number == number and (tmp_path / ROLLOUTS).read_bytes() == contents.packed


def test_what_is_left_of_rollouts_that_were_cut_off_is_not_saved(saver, tmp_path):
    """As by the last checkpoint of a run."""
    last = saver.last_contents()
    saver.write(last)
    asyncio.run(saver.save())
    assert (tmp_path / ROLLOUTS).read_bytes() == last.packed == pack_file([b"first"])


def test_a_save_that_fails_warns_once_and_does_not_count(saver, tmp_path):
    first, second = saver.contents(), saver.contents()
    (tmp_path / ROLLOUTS).parent.rmdir()
    with pytest.warns(RunWarning, match="will start again") as told:
        saver.write(first)
        saver.write(first)
    assert len(told) == 1
    (tmp_path / ROLLOUTS).parent.mkdir()
    saver.write(second)
    assert (tmp_path / ROLLOUTS).read_bytes() == second.packed


def test_a_full_disk_keeps_the_save_before_and_nothing_of_the_new_one(saver, tmp_path, monkeypatch):
    first, second = saver.contents(), saver.contents()
    saver.write(first)

    def refuse(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.warns(RunWarning, match="No space left on device"):
        saver.write(second)
    assert (tmp_path / ROLLOUTS).read_bytes() == first.packed
    assert os.listdir((tmp_path / ROLLOUTS).parent) == [(tmp_path / ROLLOUTS).name]
