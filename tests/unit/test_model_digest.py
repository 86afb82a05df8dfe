"""A run's config.json tells whether its model is still the one that it began with."""

import os

import pytest

from pipeline.models.model_digest import HEAD_BYTES, SAMPLE_BYTES, files_digest, weights_digest


def test_files_count_by_name_and_contents():
    assert files_digest({"a": b"x", "b": b"y"}) == files_digest({"b": b"y", "a": b"x"})
    different = [{}, {"a": b"xb"}, {"a": b"x", "b": b""}, {"a": b"", "b": b"x"}, {"ab": b"x"}, {"a\0001": b"x"}]
    assert len({files_digest(files) for files in different}) == len(different)


def test_weights_are_told_apart_by_name_size_beginning_and_samples(tmp_path):
    size = 3 * HEAD_BYTES
    weights = bytearray(os.urandom(size))

    def digest(contents=None, name="model.safetensors"):
        for file in tmp_path.iterdir():
            file.unlink()
        (tmp_path / name).write_bytes(weights if contents is None else contents)
        return weights_digest(str(tmp_path))

    whole = digest()
    assert digest() == whole
    assert digest(name="model-2.safetensors") != whole
    assert digest(weights[:-1]) != whole
    assert digest(bytes(size)) != whole
    for at in (0, HEAD_BYTES - 1, size // 2 + SAMPLE_BYTES - 1, size * 63 // 64):
        changed = bytearray(weights)
        changed[at] ^= 1
        assert digest(changed) != whole
    digest()
    (tmp_path / "notes.txt").write_text("of no weights")
    assert weights_digest(str(tmp_path)) == whole


def test_a_model_without_files_has_none(tmp_path):
    assert weights_digest(None) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_can_not_be_read_is_told(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(Exception, match="can't be read: Permission denied"):
        weights_digest(str(tmp_path))
