"""The journal's files: what was appended is read back whatever cuts the last one short, and other damage is named."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import JournalError, RunError
from pipeline.journal import frames, journal_files
from pipeline.journal.journal_files import Journal, events_before, read
from pipeline.journal.records import Admitted, GivenUp, Ready
from pipeline.trajectory import Group
from pipeline.user_warnings import RunWarning


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch):
    """These tests read what the system has, and need not wait until the disk has it, too."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def record(number):
    return GivenUp("failed", number, f"cause {number} " + "x" * (number % 7) * 10, number)


def written(run_dir, *files, sync_after=()):
    """A journal with one file for each of `files`, which are numbers of records; the last is not synced at its end."""
    journal, number = Journal(run_dir), 0
    for count in files:
        journal.begin()
        for _ in range(count):
            journal.append(record(number))
            if number in sync_after:
                journal.sync()
            number += 1
    return journal


def numbers(run_dir, from_ordinal=0):
    return [one.group for one in read(run_dir, from_ordinal)]


def path(run_dir, ordinal):
    return run_dir / "journal" / f"{ordinal:08d}.log"


def test_records_are_read_back_across_files(tmp_path):
    journal = written(tmp_path, 3, 0, 2)
    assert list(read(tmp_path, 0)) == [record(number) for number in range(5)]
    assert numbers(tmp_path, 1) == numbers(tmp_path, 2) == [3, 4]
    journal.close()
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]


def test_a_file_that_is_missing_is_named(tmp_path):
    written(tmp_path, 1, 1, 1)
    path(tmp_path, 1).unlink()
    with pytest.raises(JournalError, match=r"00000001\.log is not there"):
        numbers(tmp_path)
    with pytest.raises(JournalError, match=r"00000003\.log is not there"):
        numbers(tmp_path, 3)
    with pytest.raises(JournalError, match=r"00000000\.log is not there"):
        numbers(tmp_path / "elsewhere")


def test_files_that_no_checkpoint_needs_go(tmp_path):
    journal = written(tmp_path, 1, 1, 1)
    (tmp_path / "journal" / "rollouts.msgpack").write_bytes(b"other")
    journal.remove_before(1)
    assert sorted(os.listdir(tmp_path / "journal")) == ["00000001.log", "00000002.log", "rollouts.msgpack"]
    journal.remove_before(9)  # the one that is being written stays
    journal.append(record(7))
    assert sorted(os.listdir(tmp_path / "journal")) == ["00000002.log", "rollouts.msgpack"]
    assert numbers(tmp_path, 2) == [2, 7]
    assert journal.begin() == 3


def test_an_old_file_that_can_not_be_removed_stays_with_all_behind_it(tmp_path, monkeypatch):
    journal = written(tmp_path, 1, 1, 1, 1)
    unlink = Path.unlink

    def refuse(path, missing_ok=False):
        if path.name == "00000001.log":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(RunWarning, match=r"00000001\.log can't be removed: Operation not permitted; it stays"):
        journal.remove_before(3)
    assert numbers(tmp_path, 1) == [1, 2, 3]


def test_names_of_the_run_s_files_are_on_the_disk_when_its_journal_begins(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    journal = Journal(tmp_path)
    journal.begin()
    assert synced == [str(path(tmp_path, 0)), str(tmp_path / "journal"), str(tmp_path)]
    synced.clear()
    journal.begin()
    assert synced == [str(path(tmp_path, 0)), str(path(tmp_path, 1)), str(tmp_path / "journal")]


def test_a_resumed_journal_goes_on_in_the_next_file(tmp_path):
    written(tmp_path, 2)
    assert Journal(tmp_path).begin() == 1
    assert numbers(tmp_path) == [0, 1]


def test_a_last_file_cut_at_any_byte_keeps_its_whole_records(tmp_path):
    written(tmp_path, 2, 3, sync_after=[2])
    whole = path(tmp_path, 1).read_bytes()
    ends = []
    for size in range(len(whole) + 1):
        path(tmp_path, 1).write_bytes(whole[:size])
        found = numbers(tmp_path)
        ends.append(len(found))
        assert found == list(range(len(found)))
        resumed = Journal(tmp_path)
        assert resumed.begin() == (2 if size >= frames.HEADER_BYTES else 1)
        resumed.append(record(99))
        assert numbers(tmp_path) == [*found, 99]
        resumed.close()
        path(tmp_path, 2).unlink(missing_ok=True)
    assert sorted(set(ends)) == [2, 3, 4, 5] and ends[-1] == 5


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_byte_changed_in_what_was_synced_is_damage(tmp_path, ordinal):
    written(tmp_path, 2, 3, sync_after=[3])  # of the last file, all but its last record
    file = path(tmp_path, ordinal)
    good = file.read_bytes()
    on_disk = len(good) if ordinal == 0 else len(good) - 28 - len(journal_files.pack_record(record(4)))
    for place in range(on_disk):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        with pytest.raises(JournalError, match=rf"{file.name} (is damaged at byte|does not begin|has format)"):
            numbers(tmp_path)
        if ordinal == 1:
            with pytest.raises(JournalError, match=rf"{file.name} (is damaged at byte|does not begin|has format)"):
                Journal(tmp_path).begin()


@given(st.lists(st.integers(0, 4), max_size=3), st.data())
@settings(max_examples=50)
def test_a_power_failure_loses_only_what_was_not_synced(tmp_path_factory, synced, data):
    run_dir = tmp_path_factory.mktemp("run")
    journal = written(run_dir, 5, sync_after=synced)
    file = path(run_dir, 0)
    content = bytearray(file.read_bytes())
    safe = journal._synced
    num_safe = max(synced) + 1 if synced else 0
    # Blocks that never reached the disk read as zeros, or as what an older file left there.
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(safe, len(content)))
        end = data.draw(st.integers(start, len(content)))
        content[start:end] = data.draw(st.sampled_from([bytes(end - start), bytes(content[: end - start])]))
        assert len(content) == file.stat().st_size
    del content[data.draw(st.integers(safe, len(content))) :]
    file.write_bytes(content)
    found = numbers(run_dir)
    assert num_safe <= len(found) and found == list(range(len(found)))
    resumed = Journal(run_dir)
    assert resumed.begin() == 1
    assert numbers(run_dir) == found
    shutil.rmtree(run_dir)


def test_what_a_power_failure_mixed_up_is_no_damage_though_it_looks_like_many_records(tmp_path):
    written(tmp_path, 5)
    content = bytearray(path(tmp_path, 0).read_bytes())
    content[105:243] = content[:138]
    content[28:108] = content[:80]
    path(tmp_path, 0).write_bytes(content[:267])
    assert numbers(tmp_path) == []


def test_files_tell_how_many_events_stand_for_what_came_before(tmp_path):
    journal = written(tmp_path, 2, 0)
    assert events_before(tmp_path) == {0: 0, 1: 2}
    journal.append(GivenUp("filtered", 9, "zero_variance", 0))  # two events, `ready` and `filtered`
    journal.append(Ready(Group(9, 0, 0, [])))  # none
    journal.close()
    assert Journal(tmp_path).begin() == 2
    assert events_before(tmp_path) == {0: 0, 1: 2, 2: 4}
    path(tmp_path, 2).write_bytes(path(tmp_path, 2).read_bytes()[:9])
    assert events_before(tmp_path) == {0: 0, 1: 2}
    assert Journal(tmp_path).begin() == 2
    assert events_before(tmp_path) == {0: 0, 1: 2, 2: 4}


def test_a_file_under_another_name_is_refused(tmp_path):
    written(tmp_path, 2, 2)
    shutil.copy(path(tmp_path, 0), path(tmp_path, 1))
    with pytest.raises(JournalError, match="does not begin as file 1"):
        numbers(tmp_path)


def test_a_record_that_was_moved_is_refused(tmp_path):
    journal = Journal(tmp_path)
    journal.begin()
    for _ in range(3):
        journal.append(Admitted(1, 1, 1))
        journal.sync()
    file = path(tmp_path, 0)
    content = file.read_bytes()
    size = (len(content) - frames.HEADER_BYTES) // 3
    first, rest = content[: frames.HEADER_BYTES + size], content[-size:]
    file.write_bytes(first + rest + rest)
    with pytest.raises(JournalError, match=f"damaged at byte {len(first)}"):
        numbers(tmp_path)


def test_many_small_records_behind_a_hole_are_cut_off_with_it(tmp_path):
    """None of them says that the hole was on the disk; across the places where the search reads on, too."""
    journal = written(tmp_path, 3, sync_after=[0])
    first = journal._size
    for _ in range(3_000):
        journal.append(Admitted(1, 1, 1))
    content = bytearray(path(tmp_path, 0).read_bytes())
    content[first : first + 8] = bytes(8)
    path(tmp_path, 0).write_bytes(content)
    assert numbers(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("searched", [64, 1 << 20])
def test_damage_is_known_wherever_the_search_reads_on(tmp_path, monkeypatch, searched):
    monkeypatch.setattr(frames, "_SEARCHED", searched)
    journal = written(tmp_path, 2, sync_after=[1])
    first = journal._size
    journal.append(record(2))
    good = path(tmp_path, 0).read_bytes()
    for length in range(1, 80):  # of what only looks like a record, before the one that tells
        path(tmp_path, 0).write_bytes(good[: first - length] + (frames._MARKER * 20)[:length] + good[first:])
        with pytest.raises(JournalError, match="damaged at byte"):
            numbers(tmp_path)


def test_a_file_of_nothing_but_markers_does_not_keep_the_reader_for_ever(tmp_path):
    written(tmp_path, 0)
    with open(path(tmp_path, 0), "ab") as file:
        file.write(frames._FRAME.pack(frames._MARKER, 1 << 20, 1 << 10, 0, 0) * 200_000)
    with pytest.raises(JournalError, match="damaged at byte"):
        numbers(tmp_path)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_of_a_file_are_read_or_refused(tmp_path_factory, data, is_last):
    file = tmp_path_factory.mktemp("journal") / "00000000.log"
    for start in (b"", frames.header(0, 5)):
        file.write_bytes(start + data.replace(b"\0", frames._MARKER))
        try:
            assert list(frames.FrameReader(file, 0, is_last)) == []
        except JournalError as error:
            assert "00000000.log" in str(error)


def test_a_file_of_another_format_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "FORMAT", 2)
    written(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(JournalError, match="has format 2, and this version of Headway reads 1"):
        numbers(tmp_path)


def test_a_record_that_is_whole_and_no_record_names_its_place(tmp_path, monkeypatch):
    journal = written(tmp_path, 1)
    monkeypatch.setattr(journal_files, "pack_record", lambda _: b"\x93\x09\x01\x02")
    journal.append(record(0))
    with pytest.raises(JournalError, match=r"00000000\.log, the record that ends at byte \d+: .*no known kind"):
        numbers(tmp_path)


@pytest.mark.parametrize("taken", [0, 30])
def test_a_full_disk_is_told_with_need_and_have_and_leaves_nothing_torn(tmp_path, monkeypatch, taken):
    journal = written(tmp_path, 2)
    size = path(tmp_path, 0).stat().st_size

    def writev(file, parts):
        if taken:
            os.write(file, b"".join(parts)[:taken])
            monkeypatch.setattr(os, "write", refuse)
            return taken
        return refuse()

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(RunError, match=r"No space left on device\. \d+ bytes are to be written, and [\d,]+ are free"):
        journal.append(record(2))
    monkeypatch.undo()
    assert path(tmp_path, 0).stat().st_size == size
    journal.append(record(2))
    assert numbers(tmp_path) == [0, 1, 2]


def test_without_room_for_a_new_file_the_old_one_goes_on(tmp_path, monkeypatch):
    journal = written(tmp_path, 1)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(RunError, match=r"00000001\.log can't be made: No space left"):
        journal.begin()
    monkeypatch.undo()
    journal.append(record(1))
    assert numbers(tmp_path) == [0, 1]
    assert journal.begin() == 1


def test_a_record_too_large_for_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_files, "MAX_RECORD", 40)
    journal = Journal(tmp_path)
    journal.begin()
    with pytest.raises(RunError, match="GivenUp record of .* bytes is too large"):
        journal.append(record(6))
    assert numbers(tmp_path) == []


def test_a_killed_writer_loses_nothing_that_it_appended(tmp_path):
    code = (
        "import sys; from pipeline.journal.journal_files import Journal; from pipeline.journal.records import GivenUp\n"
        "journal = Journal(sys.argv[1]); journal.begin(); number = 0\n"
        "while True:\n"
        "    journal.append(GivenUp('failed', number, 'x' * 1000, 0)); print(number, flush=True); number += 1\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        told = [int(process.stdout.readline()) for _ in range(200)]
    finally:
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
        process.wait(10)
        process.stdout.close()
    found = numbers(tmp_path)
    assert found[: len(told)] == told and len(found) <= len(told) + 1


def test_a_large_journal_is_read_one_record_at_a_time(tmp_path):
    journal = Journal(tmp_path)
    journal.begin()
    for number in range(40):
        journal.append(GivenUp("failed", number, "x" * 1_000_000, 0))
    code = (
        "import resource, sys; from pipeline.journal.journal_files import read\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert sum(1 for _ in read(sys.argv[1], 0)) == 40\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20  # MiB
