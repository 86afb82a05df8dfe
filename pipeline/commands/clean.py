"""`headway clean [RUN_DIR…]`: removes what runs that were killed have left, and touches nothing of those that go on."""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.run_dir.run_files import CHECKPOINTS, ENDPOINT, EVENTS, JOURNAL, LIVE, is_run_directory
from pipeline.run_dir.run_lock import RunLock, owner
from pipeline.run_dir.synced_files import TEMPORARY, remove
from workers.processes.sockets import sweep_all

CLEAN_HELP = """Usage: headway clean [RUN_DIR…]

Removes what runs that were killed have left: the directories of their sockets, with any process of theirs that is
still there; in each RUN_DIR (default: all in runs/) checkpoints that were never finished and files that a run has
only while it goes on; reports of Headway's own errors. Runs that go on are left alone, and so is all that a run
keeps."""

RUNS = "runs"
ERROR_REPORT = re.compile(r"headway-error-[0-9]+\.txt")


def clean(arguments: Sequence[str]) -> int:
    """Prints what it removes; 1 if something could not be removed, else 0. Raises ConfigError for bad arguments."""
    for word in arguments:
        if word.startswith("-"):
            raise ConfigError(f"headway clean has no option {word.partition('=')[0]}; it takes run directories.")
        if not is_run_directory(word):
            raise ConfigError(
                f"{word} holds no {EVENTS}; name the directories of runs, or nothing to mean those in {RUNS}/."
            )
    cleaner = _Cleaner()
    for path, num_processes in sweep_all():
        ended = f", and {num_processes} of its processes were ended" if num_processes else ""
        cleaner.tell(f"removed {path} (sockets of a run that was killed{ended})")
    for path in _error_reports():
        cleaner.remove(path, "a report of an error")
    for run_dir in map(Path, arguments or sorted(map(str, Path(RUNS).glob("*")))):
        if is_run_directory(run_dir):
            cleaner.clean_run(run_dir, is_named=bool(arguments))
    if not cleaner.has_told:
        print("Nothing was left by runs that were killed.")
    return cleaner.code


class _Cleaner:
    """Removes and tells."""

    def __init__(self) -> None:
        self.code = 0
        self.has_told = False

    def tell(self, line: str) -> None:
        self.has_told = True
        print(line)

    def clean_run(self, run_dir: Path, *, is_named: bool) -> None:
        """is_named: the user asked for this one, and is told why nothing happens to it."""
        pid = owner(run_dir)
        if pid is not None:
            if is_named:
                self.tell(f"left {run_dir} alone: its run goes on (process {pid})")
            return
        if not any(_leftovers(run_dir)):
            return
        try:
            with RunLock(run_dir):  # nobody resumes it meanwhile
                was_killed = False
                for path, what in list(_leftovers(run_dir)):
                    if path.name == LIVE:  # the lock's own, which goes with it
                        was_killed = True
                    else:
                        self.remove(path, what)
        except ConfigError as error:
            self.code = 1
            self.tell(f"can't clean {run_dir}: {error}")
        else:
            if was_killed:
                self.tell(f"removed {run_dir / LIVE} (of a run that was killed)")

    def remove(self, path: Path, what: str) -> None:
        try:
            remove(path)
        except OSError as error:
            self.code = 1
            self.tell(f"can't remove {path}: {error.strerror}")
        else:
            self.tell(f"removed {path} ({what})")


def _leftovers(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """What the directory of a run that is over would not hold if that had not been killed, and what it is."""
    if os.path.lexists(run_dir / LIVE):
        yield run_dir / LIVE, "of a run that was killed"
    for folder in (run_dir, run_dir / JOURNAL, run_dir / CHECKPOINTS):
        for path in sorted(folder.glob(f"{TEMPORARY}*")):
            yield path, f"a {'checkpoint' if folder.name == CHECKPOINTS else 'file'} that was not finished"
    for name in (ENDPOINT, Path(ENDPOINT).with_suffix(".part").name):
        if os.path.lexists(run_dir / name):
            yield run_dir / name, "where an endpoint was"


def _error_reports() -> Iterator[Path]:
    """This user's."""
    for path in sorted(Path(tempfile.gettempdir()).glob("headway-error-*.txt")):
        found = path.lstat()
        if ERROR_REPORT.fullmatch(path.name) and found.st_uid == os.getuid() and not path.is_symlink():
            yield path
