"""Which checkpoints of a run directory are taken for complete, and what is said of the others."""

import os
import warnings
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoints.marker import FORMAT, MARKER, STATE, Incomplete, check_complete
from pipeline.checkpoints.saved import complete_checkpoints, latest_checkpoint, refuse_damaged, run_checkpoint
from pipeline.errors import ConfigError
from pipeline.user_warnings import RunWarning
from tests.complete_checkpoints import complete
from workers.errors import CheckpointError
from workers.model_files.checksum import checksum_of

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def write(run_dir, version, **state):
    directory = run_dir / "checkpoints" / f"version-{version}"
    (directory / "more").mkdir(parents=True)
    (directory / WEIGHTS).write_bytes(b"w" * 100)
    (directory / OPTIMIZER).write_bytes(b"o" * 200)
    (directory / "more" / "notes.txt").write_bytes(b"")
    return complete(directory, journal=version // 10, **state)


@pytest.fixture
def run_dir(tmp_path):
    for version in (9, 20, 100):
        write(tmp_path, version, rows=[[version, 1.5]], names={"a": None}, tokens=b"\x00\xff")
    return tmp_path


def versions(run_dir):
    return [one.version for one in complete_checkpoints(run_dir)]


def warning_of(run_dir, newest):
    """The one warning; `newest` is what is left to take."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = versions(run_dir)
    assert found[:1] == ([newest] if newest is not None else [])
    (warning,) = caught
    assert warning.category is RunWarning
    return str(warning.message)


def test_complete_ones_are_found_newest_first_with_their_state(run_dir):
    found = complete_checkpoints(str(run_dir))
    assert [(one.version, one.journal, one.path.name) for one in found] == [
        (100, 10, "version-100"),
        (20, 2, "version-20"),
        (9, 0, "version-9"),
    ]
    assert found[1].state() == {"journal": 2, "rows": [[20, 1.5]], "names": {"a": None}, "tokens": b"\x00\xff"}
    assert complete_checkpoints(run_dir / "nowhere") == [] and latest_checkpoint(run_dir / "nowhere") is None


@pytest.mark.parametrize("name", [WEIGHTS, "more/notes.txt", STATE, MARKER])
def test_a_missing_file_is_named(run_dir, name):
    (run_dir / "checkpoints" / "version-100" / name).unlink()
    said = warning_of(run_dir, 20)
    assert "version-100 is incomplete" in said and name in said and "Version 20 is used in its place" in said


@pytest.mark.parametrize("cut", [0, 1, 99, 101])
def test_a_file_of_another_size_is_named_with_both(run_dir, cut):
    with open(run_dir / "checkpoints" / "version-100" / WEIGHTS, "r+b") as file:
        file.truncate(cut)
    assert f"its model.safetensors has {cut} bytes of 100" in warning_of(run_dir, 20)


def test_every_truncation_of_a_marker_is_noticed(run_dir):
    marker = run_dir / "checkpoints" / "version-100" / MARKER
    whole = marker.read_bytes()
    for cut in range(len(whole)):
        marker.write_bytes(whole[:cut])
        with pytest.raises(Incomplete):
            check_complete(marker.parent, 100)
    marker.write_bytes(whole + b"\0")
    with pytest.raises(Incomplete):
        check_complete(marker.parent, 100)


def test_only_newer_ones_than_the_newest_complete_are_warned_of(run_dir):
    (run_dir / "checkpoints" / "version-9" / STATE).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions(run_dir) == [100, 20]


def test_a_checkpoint_under_another_ones_name_is_none(run_dir):
    os.rename(run_dir / "checkpoints" / "version-100", run_dir / "checkpoints" / "version-101")
    assert "its complete.msgpack is of version 100" in warning_of(run_dir, 20)


def test_without_a_complete_one_the_run_has_none(tmp_path):
    directory = write(tmp_path, 3)
    (tmp_path / "events.jsonl").touch()
    (directory / MARKER).unlink()
    assert "There is no older one" in warning_of(tmp_path, None)
    with pytest.warns(RunWarning, match="version-3 is incomplete"), pytest.raises(ConfigError, match="--resume"):
        run_checkpoint(tmp_path)


def test_links_to_another_disk_are_followed(tmp_path):
    write(tmp_path / "disk", 4)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints")
    assert versions(tmp_path / "run") == [4]
    (tmp_path / "disk" / "checkpoints" / "version-5").symlink_to(tmp_path / "nowhere")
    assert "version-5 is incomplete" in warning_of(tmp_path / "run", 4)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_checkpoint_that_can_not_be_read_is_passed_over(run_dir):
    marker = run_dir / "checkpoints" / "version-100" / MARKER
    marker.chmod(0)
    assert "complete.msgpack can't be read (Permission denied)" in warning_of(run_dir, 20)


@pytest.mark.parametrize("at", [0, 10, -1])
def test_a_checkpoint_whose_state_has_other_bytes_is_passed_over(run_dir, at):
    path = run_dir / "checkpoints" / "version-100" / STATE
    found = bytearray(path.read_bytes())
    found[at] ^= 1
    path.write_bytes(found)
    assert f"version-100 is incomplete: its {STATE} is not what was saved" in warning_of(run_dir, 20)


def test_a_state_that_is_changed_once_it_was_found_whole_is_refused(run_dir):
    (newest, *_) = complete_checkpoints(run_dir)
    path = run_dir / "checkpoints" / "version-100" / STATE
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="is not what was saved"):
        newest.state()


# --- damaged contents -----------------------------------------------------------------------------------------------


def flip(path, at=50):
    """One bit."""
    found = bytearray(path.read_bytes())
    found[at] ^= 1
    path.write_bytes(found)


def test_a_flipped_bit_of_any_file_is_found_and_named(run_dir):
    directory = run_dir / "checkpoints" / "version-100"
    (directory / "more" / "notes.txt").write_bytes(b"x" * 100)
    complete(directory, journal=10)
    for name in (WEIGHTS, OPTIMIZER, "more/notes.txt"):
        (newest, *_) = complete_checkpoints(run_dir)
        newest.check_contents()
        flip(directory / name)
        with pytest.raises(Incomplete, match=f"its {name} is not what was saved"):
            newest.check_contents()
        flip(directory / name)
    (directory / WEIGHTS).unlink()
    with pytest.raises(Incomplete, match="its model.safetensors can't be read"):
        newest.check_contents()


def test_a_model_with_damaged_weights_is_passed_over_and_named(run_dir):
    (run_dir / "events.jsonl").touch()
    flip(run_dir / "checkpoints" / "version-100" / WEIGHTS)
    with pytest.warns(RunWarning) as caught:
        assert latest_checkpoint(run_dir) == run_dir / "checkpoints" / "version-20"
    (told,) = [str(warning.message) for warning in caught]
    assert "version-100 is damaged: its model.safetensors is not what was saved. Version 20 is used" in told
    for version in (20, 9):
        flip(run_dir / "checkpoints" / f"version-{version}" / WEIGHTS)
    with pytest.warns(RunWarning) as caught:
        with pytest.raises(ConfigError, match=r"All checkpoints of .* are damaged; put a good copy"):
            run_checkpoint(run_dir)
    assert len(caught) == 3 and str(caught[-1].message).endswith("There is no older one.")


def test_a_model_is_loaded_without_the_optimizer_so_that_is_not_looked_at(run_dir):
    flip(run_dir / "checkpoints" / "version-100" / OPTIMIZER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_checkpoint(run_dir) == run_dir / "checkpoints" / "version-100"


def test_a_copy_of_a_checkpoint_is_looked_at_whatever_its_name(run_dir, tmp_path):
    copy = (run_dir / "checkpoints" / "version-100").rename(tmp_path / "mine")
    (copy / OPTIMIZER).unlink()
    refuse_damaged(copy)
    flip(copy / WEIGHTS)
    with pytest.raises(
        ConfigError, match=r"mine is damaged: its model.safetensors is not what was saved\. Name another"
    ):
        refuse_damaged(copy)
    (copy / MARKER).unlink()
    refuse_damaged(copy)  # a model directory as any other


def test_markers_without_checksums_are_refused_as_such(tmp_path):
    (tmp_path / STATE).write_bytes(b"ab")
    old = {"format": 1, "version": 7, "journal": 0, "files": {STATE: 2}, "state_crc": 5}
    (tmp_path / MARKER).write_bytes(msgpack.packb(old))
    with pytest.raises(Incomplete, match="its complete.msgpack has format 1, and this Headway reads 2"):
        check_complete(tmp_path, 7)


# --- hostile markers -------------------------------------------------------------------------------------------------

FILE = [2, checksum_of(b"ab")]
WHOLE = {"format": FORMAT, "version": 7, "journal": 0, "files": {STATE: FILE}}


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"version": True},
        {"journal": "0"},
        {"journal": 1.5},
        {"files": [STATE]},
        {"files": {}},
        {"files": {STATE: FILE, "../events.jsonl": [0, 0]}},
        {"files": {STATE: FILE, "/etc/passwd": [0, 0]}},
        {"files": {STATE: FILE, "a/../../b": [0, 0]}},
        {"files": {STATE: FILE, "a\0b": [0, 0]}},
        {"files": {STATE: FILE, 3: [4, 0]}},
        {"files": {STATE: 2}},
        {"files": {STATE: [2]}},
        {"files": {STATE: [-2, FILE[1]]}},
        {"files": {STATE: [2, None]}},
        {"files": {STATE: [2, FILE[1] + 1]}},
        {"files": {STATE: [*FILE, 0]}},
        {"more": 1},
        {"format": FORMAT + 1},
        {"format": "2"},
        {"format": [1]},
    ],
)
def test_a_marker_with_other_values_is_none(tmp_path, change):
    (tmp_path / STATE).write_bytes(b"ab")
    (tmp_path / MARKER).write_bytes(msgpack.packb(WHOLE))
    assert check_complete(tmp_path, 7).files == {STATE: tuple(FILE)}
    (tmp_path / MARKER).write_bytes(msgpack.packb(WHOLE | change))
    with pytest.raises(Incomplete):
        check_complete(tmp_path, 7)


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory):
    return tmp_path_factory.mktemp("version-7")


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    contents=st.binary(max_size=200)
    | plain.map(msgpack.packb)
    | st.builds(lambda key, value: msgpack.packb(WHOLE | {key: value}), st.sampled_from(sorted(WHOLE)), plain)
)
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_marker_or_none(anywhere: Path, contents: bytes):
    (anywhere / STATE).write_bytes(b"ab")
    (anywhere / MARKER).write_bytes(contents)
    try:
        marker = check_complete(anywhere, 7)
    except Incomplete as error:
        assert len(str(error)) < 400
    else:
        assert marker.version == 7 and marker.files[STATE] == tuple(FILE)
