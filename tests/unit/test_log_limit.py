"""A log that gets too long is cut to its end, and says so."""

from pipeline.processes.environment.log_limit import limit_log


def test_a_log_is_cut_to_its_end_and_goes_on_behind_it(tmp_path):
    path = tmp_path / "environment-0.log"
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"a" * 900 + b"the end\n")
        assert not limit_log(str(path), max_bytes=908, kept_bytes=8)
        assert len(path.read_bytes()) == 908
        writer.write(b"!")
        assert limit_log(str(path), max_bytes=908, kept_bytes=9)
        assert path.read_bytes() == b"[900 bytes before this were cut: a log holds 908]\nthe end\n!"
        writer.write(b"more\n")
    assert path.read_bytes().endswith(b"the end\n!more\n")


def test_a_log_that_is_not_there_is_no_matter(tmp_path):
    assert not limit_log(str(tmp_path / "none.log"))
