"""What the kernel tells of a process: its state, the processor it has used, the bytes it has read and written."""

import os
from collections.abc import Iterable
from typing import NamedTuple

HALTED = ("T", "t")  # by a signal (SIGSTOP), by a debugger
ON_DISK = "D"


class ProcessStat(NamedTuple):
    """state: the kernel's letter, "" of a process that is gone. ticks: clock ticks of the processor, all threads."""

    state: str
    ticks: int

    @property
    def halted(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""
        return self.state in HALTED


def read_stat(pid: int) -> ProcessStat:
    fields = _stat_fields(f"/proc/{pid}/stat")
    return ProcessStat(fields[0], int(fields[11]) + int(fields[12])) if fields else ProcessStat("", 0)


def bytes_moved(pid: int) -> int:
    """Read and written by it so far, also from and to caches; 0 where that can't be seen."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    except OSError:
        return 0


def processor_ticks(pid: int, threads: Iterable[int]) -> dict[int, int]:
    """Clock ticks that threads of a process have used of the processor, by the kernel's thread ids; without those that
    have ended.
    """
    ticks = {}
    for thread in threads:
        fields = _stat_fields(f"/proc/{pid}/task/{thread}/stat")
        if fields:
            ticks[thread] = int(fields[11]) + int(fields[12])
    return ticks


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal: without one it would die of it."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False


def thread_states(pid: int) -> list[str]:
    """`name (state, where it sleeps in the kernel)` of each thread; empty if the process is gone."""
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return []
    return [_thread_state(f"/proc/{pid}/task/{thread}") for thread in threads]


def _thread_state(path: str) -> str:
    fields = _stat_fields(f"{path}/stat")
    name, where = (_first_line(f"{path}/{file}") for file in ("comm", "wchan"))
    return f"{name} ({fields[0] if fields else 'gone'}, {where or '0'})"


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _stat_fields(path: str) -> list[str]:
    """Those behind the command's name: the state first. Empty if the process is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
