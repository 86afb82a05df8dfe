"""The journal on disk: `RUN_DIR/journal/<ordinal>.log`, appended record by record; a new file at each checkpoint.

A record is handed to the system by one write, so a killed process loses none that `append` has returned from; `sync`
guards it against a power failure, too. A write that a kill or a full disk cut short leaves a torn record at the end of
the last file. Nothing was done upon it, and the next run cuts it off.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import JournalError, RunError
from pipeline.journal.frames import HEADER_BYTES, MAX_RECORD, FrameReader, events_at_start, frame, header
from pipeline.journal.record_codec import pack_record, unpack_record
from pipeline.journal.records import Record, events_of
from pipeline.run_dir.run_files import EVENTS, FIRST_JOURNAL_FILE, JOURNAL
from pipeline.run_dir.synced_files import sync_directory
from pipeline.user_warnings import warn_of_run

_NAME = re.compile(r"([0-9]{8})\.log")


class Journal:
    """The writer of one run's journal; one process has it at a time. `begin` comes first."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        """Raises RunError if the directory can't be made."""
        self.directory = Path(run_dir) / JOURNAL
        self._file = -1  # descriptor
        self._ordinal = -1
        self._size = 0
        self._synced = 0
        self._events = 0
        try:
            self.directory.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.directory} can't be made: {error.strerror}; see to the run directory.") from error

    def begin(self) -> int:
        """Go on in the next file, and return its ordinal: what was written before is on the disk, and whole.

        The first call after a death cuts off what it left torn. Raises JournalError for damage beyond that, and
        RunError if no file can be made: the journal then goes on in the one it has.
        """
        if self._file >= 0:
            self.sync()
        else:
            self._events = cut_torn_end(self.directory)
        found = _ordinals(self.directory)
        ordinal = found[-1] + 1 if found else FIRST_JOURNAL_FILE
        path, start, file = path_of(self.directory, ordinal), header(ordinal, self._events), -1
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            if os.write(file, start) < len(start):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
            sync_directory(self.directory)
            if self._file < 0:  # in a run that begins: its own name, and those of the logs beside it
                sync_directory(self.directory.parent)
        except OSError as error:
            if file >= 0:
                os.close(file)
                path.unlink(missing_ok=True)
            raise RunError(f"{path} can't be made: {error.strerror}; make room, or see to that place.") from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self._ordinal = file, ordinal
        self._size = self._synced = len(start)
        return ordinal

    def append(self, record: Record) -> None:
        """Write one record; when this returns, a death of the process does not lose it. Raises RunError, with need and
        have when the disk is full; nothing of the record is left then.
        """
        data = pack_record(record)
        if len(data) > MAX_RECORD:
            raise RunError(
                f"A {type(record).__name__} record of {len(data):,} bytes is too large for the journal, which takes "
                f"{MAX_RECORD:,}. Use fewer groups_per_step, or shorter trajectories."
            )
        events = self._events + len(events_of(record))
        self._write(frame(data, self._ordinal, self._size, self._synced, events), data)
        self._events = events

    def sync(self) -> None:
        """Wait until all records are on the disk: some milliseconds."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise RunError(f"{self._path()} can't be written to the disk: {error.strerror}.") from error
        self._synced = self._size

    def remove_before(self, ordinal: int) -> None:
        """Files that no checkpoint needs any more, but for the one that is written now. What can't be removed stays,
        and is warned of.
        """
        for old in _ordinals(self.directory):  # the oldest first: a death in between leaves no gap
            if old < min(ordinal, self._ordinal):
                path = path_of(self.directory, old)
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    warn_of_run(f"The old file {path} can't be removed: {error.strerror}; it stays.")
                    return

    def close(self) -> None:
        """Sync and close; a second call does nothing."""
        if self._file < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._file)
            self._file = -1

    def _path(self) -> Path:
        return path_of(self.directory, self._ordinal)

    def _write(self, start: bytes, data: bytes) -> None:
        assert self._file >= 0, "the journal is not open: begin comes before append"
        wanted = len(start) + len(data)
        try:
            written = os.writev(self._file, (start, data))
            if written < wanted:  # a full disk takes a part, and says why the next time
                written += os.write(self._file, (start + data)[written:])
            if written < wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, self._size)  # what follows must not stand behind a torn record
            free = shutil.disk_usage(self.directory).free
            raise RunError(
                f"{self._path()} can't be written: {error.strerror}. {wanted:,} bytes are to be written, and "
                f"{free:,} are free there; make room, then resume the run."
            ) from error
        self._size += wanted


def read(run_dir: str | os.PathLike[str], from_ordinal: int) -> Iterator[Record]:
    """All records from file `from_ordinal` on, one in memory at a time. What a death left torn is passed over.

    Raises JournalError for a missing file, and for damage that no death explains.
    """
    directory = Path(run_dir) / JOURNAL
    found = [ordinal for ordinal in _ordinals(directory) if ordinal >= from_ordinal]
    last = found[-1] if found else from_ordinal
    for ordinal in range(from_ordinal, last + 1):
        path = path_of(directory, ordinal)
        if ordinal not in found:
            raise JournalError(f"{path} is not there, and a resume needs it; put it back, or start a new run.")
        reader = FrameReader(path, ordinal, is_last=ordinal == last)
        for data in reader:
            try:
                yield unpack_record(data)
            except JournalError as error:
                raise JournalError(f"{path}, the record that ends at byte {reader.end}: {error}") from error


def is_blank(run_dir: str | os.PathLike[str]) -> bool:
    """Whether nothing was decided since the run began: its journal has no record yet, or has not begun. A journal that
    was lost is none: then the log, which begins after it, tells of something.
    """
    directory = Path(run_dir) / JOURNAL
    paths = [path_of(directory, ordinal) for ordinal in _ordinals(directory)]
    if not paths:
        log = Path(run_dir) / EVENTS
        return not log.exists() or log.stat().st_size == 0
    first = path_of(directory, FIRST_JOURNAL_FILE)
    return first in paths and all(path.stat().st_size <= HEADER_BYTES for path in paths)


def cut_torn_end(directory: Path) -> int:
    """Cut off what a death left torn at the end of the last file. Returns how many events stand for all records. A file
    whose header never reached the disk goes as a whole. Raises JournalError for other damage.
    """
    found = _ordinals(directory)
    if not found:
        return 0
    path = path_of(directory, found[-1])
    reader = FrameReader(path, found[-1], is_last=True)
    for _ in reader:
        pass
    try:
        if reader.end < HEADER_BYTES:
            path.unlink()
            sync_directory(directory)
            return cut_torn_end(directory)
        with open(path, "r+b") as file:
            if path.stat().st_size > reader.end:
                file.truncate(reader.end)
            os.fsync(file.fileno())  # a killed run's last records may be with the system only
    except OSError as error:
        raise JournalError(f"{path} can't be mended: {error.strerror}; see to that file.") from error
    return reader.events


def events_before(run_dir: str | os.PathLike[str]) -> dict[int, int]:
    """Ordinal of each file -> how many events of the audit log stand for the records of those before it. A last file
    whose header never reached the disk is passed over.
    """
    directory = Path(run_dir) / JOURNAL
    found = _ordinals(directory)
    return {
        ordinal: events
        for ordinal in found
        if (events := events_at_start(path_of(directory, ordinal), ordinal, is_last=ordinal == found[-1])) is not None
    }


def _ordinals(directory: Path) -> list[int]:
    """Of the files that are there, ascending; other files are not the journal's."""
    if not directory.is_dir():
        return []
    return sorted(int(name[1]) for path in os.listdir(directory) if (name := _NAME.fullmatch(path)))


def path_of(directory: Path, ordinal: int) -> Path:
    """Of one file, in the journal's directory."""
    return directory / f"{ordinal:08d}.log"
