"""A checkpoint gets its name only when all of it is on disk; a fake learner writes it."""

import asyncio
import os
from pathlib import Path

from pipeline.checkpoints import checkpoints
from tests.fake_learner import WRITTEN, FakeRun, open_checkpoints


def test_files_and_directory_are_synced_before_the_name_is_given_and_the_name_after(tmp_path, monkeypatch):
    done = []

    def noting(function, name, place):
        def call(*arguments):
            done.append((name, place(arguments[0])))
            return function(*arguments)

        return call

    def relative(path):
        return str(Path(path).relative_to(tmp_path))

    def of_descriptor(descriptor):
        return relative(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noting(os.fsync, "sync", of_descriptor))
    monkeypatch.setattr(os, "rename", noting(os.rename, "rename", relative))
    made = open_checkpoints(tmp_path)
    asyncio.run(made.save(FakeRun(), 3, {"journal": 1}))
    temporary = f"checkpoints/{checkpoints.TEMPORARY}version-3"
    renamed = done.index(("rename", temporary))
    before, after = done[:renamed], done[renamed + 1 :]
    names = ("config.json", "more/notes.txt", "more", "state.msgpack")
    assert {("sync", f"{temporary}/{name}") for name in names} <= set(before)
    assert before[-2:] == [("sync", f"{temporary}/complete.msgpack"), ("sync", temporary)]  # behind the weights
    assert after == [("sync", "checkpoints")]
    assert made.latest == tmp_path / "checkpoints" / "version-3"
    assert {str(path.relative_to(made.latest)) for path in made.latest.rglob("*") if path.is_file()} == WRITTEN


def test_the_learner_is_told_an_absolute_place_also_after_a_change_of_directory(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    made = open_checkpoints(Path("run"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    asyncio.run(made.save(FakeRun(), 0, {"journal": 0}))
    assert (tmp_path / "run/checkpoints/version-0/model.safetensors").read_bytes() == b"weights of 0"
