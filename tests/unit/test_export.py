"""What `headway export` makes of a run directory, and when it refuses."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.small_models import write_json, write_small_model
from pipeline.checkpoints.marker import MARKER, STATE
from pipeline.checkpoints.model_files import own_model_files
from pipeline.checkpoints.saved import latest_checkpoint, weights_directory
from pipeline.commands import cli, export
from pipeline.errors import ConfigError
from tests.complete_checkpoints import complete
from workers.errors import CheckpointError
from workers.model import init_flat
from workers.model_config import TINY
from workers.model_files.config import read_model_config
from workers.model_files.flat_weights import load_flat, save_weights
from workers.model_files.tensor_files import INDEX, SINGLE


@pytest.fixture
def run_dir(tmp_path):
    """A run whose newest checkpoint, version 10, is a qwen3 model that came in bfloat16."""
    run_dir = tmp_path / "run"
    for version in (9, 10):
        write_checkpoint(run_dir, version, torch_dtype="bfloat16")
    (run_dir / "events.jsonl").write_text("")
    return run_dir


def write_checkpoint(run_dir, version, **config):
    directory = run_dir / "checkpoints" / f"version-{version}"
    return complete(write_small_model(directory, family="qwen3", tie=False, seed=version, **config))


def exported(run_dir, out):
    assert cli.main(["export", str(run_dir), str(out)]) == 0
    assert not list(out.parent.glob(".*export*"))
    return out


def test_newest_checkpoint_is_written_in_the_dtype_of_its_source(run_dir, tmp_path, capsys):
    out = exported(run_dir, tmp_path / "out")
    checkpoint = run_dir / "checkpoints" / "version-10"
    assert set(os.listdir(out)) == set(os.listdir(checkpoint)) - {STATE, MARKER}
    for name in set(os.listdir(out)) - {SINGLE}:
        assert (out / name).read_bytes() == (checkpoint / name).read_bytes()
    saved = load_file(checkpoint / SINGLE)
    written = load_file(out / SINGLE)
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], saved[name].bfloat16()) for name in saved)
    said = capsys.readouterr().out
    num_bytes = sum(2 * tensor.numel() for tensor in saved.values())
    assert said == f"{out}: {checkpoint}, 1 file of {num_bytes:,} bytes, bfloat16\n"


def test_a_large_model_is_split_as_others_are(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 100_000)
    out = exported(run_dir, tmp_path / "out")
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert max((out / file).stat().st_size for file in files) < 105_000  # the header comes on top
    index = json.loads((out / INDEX).read_text())
    config = read_model_config(out)
    flat = load_flat(run_dir / "checkpoints" / "version-10", config)
    assert index["metadata"]["total_size"] == 2 * flat.numel()
    assert torch.equal(load_flat(out, config), flat.bfloat16().float())


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 1)
    out = exported(run_dir, tmp_path / "out")
    assert all(len(load_file(file)) == 1 for file in out.glob("*.safetensors"))


def test_the_directory_gets_its_name_when_all_of_it_is_on_disk(run_dir, tmp_path, monkeypatch):
    done = []

    def noting(function, name):
        def call(path, *more):
            done.append((name, Path(path).name))
            return function(path, *more)

        return call

    monkeypatch.setattr(export, "sync_directory", noting(export.sync_directory, "sync"))
    monkeypatch.setattr(export.os, "rename", noting(os.rename, "rename"))
    assert cli.main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    temporary = ".out.headway-export"
    assert done == [("sync", temporary), ("rename", temporary), ("sync", tmp_path.name)]


def test_an_empty_directory_is_as_good_as_a_new_one(run_dir, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.headway-export").mkdir()  # of an export that was killed
    (tmp_path / ".out.headway-export" / "junk").write_text("")
    assert "junk" not in os.listdir(exported(run_dir, tmp_path / "out"))


def test_a_builtin_models_checkpoint_says_that_it_has_no_tokenizer(tmp_path, capsys):
    directory = tmp_path / "run" / "checkpoints" / "version-3"
    directory.mkdir(parents=True)
    (tmp_path / "run" / "events.jsonl").write_text("")
    (directory / "config.json").write_bytes(own_model_files(TINY, [1])["config.json"])
    save_weights(directory / SINGLE, init_flat(TINY, seed=1), TINY)
    complete(directory)
    out = exported(tmp_path / "run", tmp_path / "out")
    assert "There is no tokenizer in it" in capsys.readouterr().out
    assert read_model_config(out) == TINY
    assert torch.equal(load_flat(out, TINY), init_flat(TINY, seed=1))


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    """The sentence that ends a command with exit code 2."""
    assert cli.main(["export", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_bad_arguments_are_refused_in_one_sentence(run_dir, tmp_path, capsys):
    assert "needs a run and a new directory" in refused(capsys, run_dir)
    assert "needs a run and a new directory" in refused(capsys, run_dir, "--out", tmp_path / "out")
    assert "name the directory of a run" in refused(capsys, tmp_path, tmp_path / "out")
    (tmp_path / "file").write_text("")
    assert "is not a directory" in refused(capsys, run_dir, tmp_path / "file")
    assert "is not empty" in refused(capsys, run_dir, run_dir)
    assert "make it first" in refused(capsys, run_dir, tmp_path / "absent" / "out")
    shutil.rmtree(run_dir / "checkpoints")
    assert "holds no complete checkpoint" in refused(capsys, run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_can_not_be_written_to_is_told(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert "can't be written to" in refused(capsys, run_dir, tmp_path / "out")


@pytest.mark.parametrize("fault", ["full disk", "missing tensor", "dtype"])
def test_a_failed_export_leaves_nothing(run_dir, tmp_path, monkeypatch, capsys, fault):
    checkpoint = run_dir / "checkpoints" / "version-10"
    if fault == "full disk":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    elif fault == "missing tensor":
        config = json.loads((checkpoint / "config.json").read_text())
        write_json(checkpoint / "config.json", config | {"num_hidden_layers": 3})
    else:
        config = json.loads((checkpoint / "config.json").read_text())
        write_json(checkpoint / "config.json", config | {"torch_dtype": "int8"})
    complete(checkpoint)
    assert cli.main(["export", str(run_dir), str(tmp_path / "out")]) == 1
    said = {
        "full disk": "1,000 bytes free",
        "missing tensor": "model.layers.2.",
        "dtype": "names the dtype 'int8'",
    }[fault]
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run"]


# --- which directory is meant ----------------------------------------------------------------------------------------


def test_versions_are_compared_as_numbers_and_half_made_ones_ignored(run_dir):
    for name in (".tmp-version-11", "version-x", "version-12.tmp"):
        (run_dir / "checkpoints" / name).mkdir()
    assert latest_checkpoint(run_dir) == run_dir / "checkpoints" / "version-10"


def test_weights_come_from_a_run_or_from_a_model(run_dir, tmp_path):
    checkpoint = run_dir / "checkpoints" / "version-10"
    assert weights_directory(run_dir) == checkpoint
    assert weights_directory(str(checkpoint)) == Path(checkpoint)
    with pytest.raises(ConfigError, match="neither a run directory nor a model directory"):
        weights_directory(tmp_path)


def test_a_checkpoint_that_is_not_whole_is_passed_over_with_a_warning(run_dir, tmp_path, capsys):
    (run_dir / "checkpoints" / "version-10" / SINGLE).unlink()
    exported(run_dir, tmp_path / "out")
    said = capsys.readouterr()
    assert "version-10 is incomplete: its model.safetensors is missing. Version 9 is used" in said.err
    assert "version-9, 1 file" in said.out


def test_damaged_weights_are_not_exported(run_dir, tmp_path, capsys):
    path = run_dir / "checkpoints" / "version-10" / SINGLE
    *all_but_last, last = path.read_bytes()
    path.write_bytes(bytes([*all_but_last, last ^ 1]))
    assert cli.main(["export", str(path.parent), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        "version-10 is damaged: its model.safetensors is not what was saved" in said and not (tmp_path / "out").exists()
    )
    exported(run_dir, tmp_path / "out")
    said = capsys.readouterr()
    assert "version-10 is damaged: its model.safetensors is not what was saved. Version 9 is used" in said.err
    assert "version-9, 1 file" in said.out


def test_an_older_checkpoint_is_exported_by_its_own_name(run_dir, tmp_path, capsys):
    older = run_dir / "checkpoints" / "version-9"
    exported(older, tmp_path / "out")
    assert f"{older}, 1 file" in capsys.readouterr().out
    (older / "state.msgpack").unlink()
    assert "version-9 is incomplete: its state.msgpack is missing" in refused(capsys, older, tmp_path / "other")


def test_a_checkpoint_without_weights_is_no_export(run_dir, tmp_path):
    checkpoint = run_dir / "checkpoints" / "version-10"
    (checkpoint / SINGLE).unlink()
    complete(checkpoint)
    with pytest.raises(CheckpointError, match="holds no weights"):
        export.export(str(run_dir), str(tmp_path / "out"))
