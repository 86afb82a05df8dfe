"""Saves that the disk or a person cuts short: what was saved before is as it was, and the next save works."""

import asyncio
import errno
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest

from pipeline.checkpoints.saved import complete_checkpoints
from pipeline.user_warnings import RunWarning
from tests.fake_learner import FakeRun, entries, open_checkpoints, save, versions
from workers.errors import CheckpointError

# --- disks ------------------------------------------------------------------------------------------------------------


class FullRun(FakeRun):
    async def save_weights(self, version, path, optimizer_path):
        Path(path).write_bytes(b"half")
        raise CheckpointError(f"{path} has 5 bytes free, and 4,000 are to be written; make room.")


def test_a_periodic_save_without_room_warns_and_the_run_goes_on(tmp_path, monkeypatch):
    made = open_checkpoints(tmp_path, weights_every=5)
    save(made, 0)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=900))
        assert made.due(5)
        with pytest.warns(RunWarning) as caught:
            save(made, 5, may_fail=True)
        (warning,) = caught
        assert "has 900 bytes free, and 1,0" in str(warning.message)
        assert "saves at 10 next" in str(warning.message) and "version-0 is as it was" in str(warning.message)
        assert not made.due(6) and made.due(10)
        with pytest.raises(CheckpointError, match="has 900 bytes free, and 1,0"):
            save(made, 6)
    assert versions(tmp_path) == [0] and entries(tmp_path) == ["version-0"]
    assert made.latest == tmp_path / "checkpoints" / "version-0"
    save(made, 10)
    assert versions(tmp_path) == [10, 0]


def test_a_disk_that_the_learner_finds_full_leaves_nothing_half_written(tmp_path):
    made = open_checkpoints(tmp_path)
    with pytest.warns(RunWarning, match="there is none yet"):
        save(made, 3, FullRun(), may_fail=True)
    assert entries(tmp_path) == [] and made.latest is None
    with pytest.raises(CheckpointError, match="has 5 bytes free, and 4,000"):
        save(made, 4, FullRun())


def test_a_disk_that_fills_up_meanwhile_is_told_with_need_and_have(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"has [\d,]+ bytes free, and 1,0\d\d are to be written; make room"):
        save(open_checkpoints(tmp_path), 3)
    assert entries(tmp_path) == []


def test_other_deaths_than_the_disks_are_no_warning(tmp_path):
    class Broken(FakeRun):
        async def save_weights(self, version, path, optimizer_path):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(open_checkpoints(tmp_path), 3, Broken(), may_fail=True)
    assert entries(tmp_path) == []


# --- what is there already ---------------------------------------------------------------------------------------


def test_a_version_is_saved_once(tmp_path):
    made = open_checkpoints(tmp_path)
    save(made, 2)
    asyncio.run(made.save(FullRun(), 2, {"journal": 9}))
    assert versions(tmp_path) == [2]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) <= 1


def test_an_incomplete_one_is_made_anew(tmp_path):
    made = open_checkpoints(tmp_path)
    save(made, 2)
    (made.latest / "optimizer.safetensors").unlink()
    again = open_checkpoints(tmp_path)
    assert again.latest is None and again.due(2)
    save(again, 2)
    assert versions(tmp_path) == [2] and entries(tmp_path) == ["version-2"]


def test_links_in_the_place_of_leftovers_lose_only_themselves(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".tmp-version-2").symlink_to(tmp_path / "elsewhere")
    save(open_checkpoints(tmp_path), 2)
    assert versions(tmp_path) == [2] and entries(tmp_path) == ["version-2"]
    assert (tmp_path / "elsewhere" / "precious").read_text() == "x"


def test_checkpoints_may_lie_on_another_disk(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    made = open_checkpoints(tmp_path / "run", keep=1)
    save(made, 2)
    save(made, 4)
    assert asyncio.run(made.prune(4)) == 4
    assert os.listdir(tmp_path / "disk") == ["version-4"] and versions(tmp_path / "run") == [4]


def test_a_state_is_what_it_was_when_the_save_began(tmp_path):
    state = {"journal": 2, "of": 2, "groups": [1, 2]}

    class Later(FakeRun):
        async def save_weights(self, version, path, optimizer_path):
            state["groups"].append(3)
            return await super().save_weights(version, path, optimizer_path)

    asyncio.run(open_checkpoints(tmp_path).save(Later(), 2, state))
    assert complete_checkpoints(tmp_path)[0].state()["groups"] == [1, 2]


def test_a_state_must_name_its_journals_file(tmp_path):
    with pytest.raises(KeyError):
        asyncio.run(open_checkpoints(tmp_path).save(FakeRun(), 2, {}))
    with pytest.raises(AssertionError, match="journal file is None"):
        asyncio.run(open_checkpoints(tmp_path).save(FakeRun(), 2, {"journal": None}))


def test_what_a_learner_left_that_died_in_the_save_is_no_part_of_it(tmp_path):
    class Second(FakeRun):
        async def save_weights(self, version, path, optimizer_path):
            Path(path).with_name(".model.safetensors.tmp-77").write_bytes(b"half")
            (Path(path).parent / "more" / "notes.txt").stat()
            return await super().save_weights(version, path, optimizer_path)

    save(open_checkpoints(tmp_path), 2, Second())
    assert versions(tmp_path) == [2]
    assert not list((tmp_path / "checkpoints" / "version-2").glob(".*"))


def test_a_learner_that_wrote_no_file_makes_no_checkpoint(tmp_path):
    class Forgetful(FakeRun):
        async def save_weights(self, version, path, optimizer_path):
            Path(path).write_bytes(b"weights")
            return 1, 2

    with pytest.raises(CheckpointError, match="version-2 can't be made: No such file or directory"):
        save(open_checkpoints(tmp_path), 2, Forgetful())
    assert entries(tmp_path) == []


def test_a_cancelled_save_leaves_nothing(tmp_path):
    async def cancel():
        begun = asyncio.Event()

        class Slow(FakeRun):
            async def save_weights(self, version, path, optimizer_path):
                begun.set()
                await asyncio.Event().wait()

        saving = asyncio.create_task(open_checkpoints(tmp_path).save(Slow(), 2, {"journal": 0}))
        await begun.wait()
        assert entries(tmp_path) == [".tmp-version-2"]
        saving.cancel()
        await asyncio.wait([saving])
        assert saving.cancelled()

    asyncio.run(cancel())
    assert entries(tmp_path) == []


# --- when, and what goes -----------------------------------------------------------------------------------------


def test_one_is_due_at_the_start_and_then_every_so_many_updates(tmp_path):
    made = open_checkpoints(tmp_path, weights_every=3)
    assert made.due(0)
    save(made, 0)
    assert [version for version in range(9) if made.due(version)] == [3, 4, 5, 6, 7, 8]
    save(made, 4)
    assert [version for version in range(9) if made.due(version)] == [7, 8]
    assert [version for version in range(9) if open_checkpoints(tmp_path, weights_every=3).due(version)] == [7, 8]


def test_old_ones_go_as_the_rule_says(tmp_path):
    made = open_checkpoints(tmp_path, keep=1, keep_best=1)
    for version in (0, 2, 4, 6):
        save(made, version)
    made.evaluating(2)
    assert asyncio.run(made.prune(5)) == 4
    assert versions(tmp_path) == [6, 4, 2]
    made.scored(2, 0.5)
    made.scored(4, 0.25)
    assert asyncio.run(made.prune(6)) == 6
    assert versions(tmp_path) == [6, 2]
    assert asyncio.run(made.prune(6)) == 6
    assert entries(tmp_path) == ["version-2", "version-6"]


def test_links_and_foreign_files_stay(tmp_path):
    made = open_checkpoints(tmp_path, keep=1)
    for version in (2, 4, 6):
        save(made, version)
    os.rename(tmp_path / "checkpoints" / "version-2", tmp_path / "mine")
    (tmp_path / "checkpoints" / "version-2").symlink_to(tmp_path / "mine")
    (tmp_path / "checkpoints" / "notes").mkdir()
    (tmp_path / "checkpoints" / "version-3").write_text("a file")
    asyncio.run(made.prune(6))
    assert entries(tmp_path) == ["notes", "version-2", "version-3", "version-6"]
    assert len(os.listdir(tmp_path / "mine")) > 3


def test_one_that_can_not_be_removed_is_told_and_stays_whole_or_goes_later(tmp_path, monkeypatch):
    made = open_checkpoints(tmp_path, keep=1)
    for version in (2, 4):
        save(made, version)
    with monkeypatch.context() as failing:
        failing.setattr(os, "rename", lambda old, new: os.stat(tmp_path / "absent"))
        with pytest.warns(RunWarning, match="version-2 can't be removed: No such file or directory; it stays"):
            asyncio.run(made.prune(4))
    assert versions(tmp_path) == [4, 2]
    asyncio.run(made.prune(4))
    assert versions(tmp_path) == [4]


def test_events_tell_of_saves_alone(tmp_path):
    made = open_checkpoints(tmp_path)
    save(made, 2)
    with pytest.raises(CheckpointError):
        save(made, 4, FullRun())
    made._events.flush()
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["version"], event["path"]) == ("checkpoint", 2, "checkpoints/version-2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions(tmp_path) == [2]
