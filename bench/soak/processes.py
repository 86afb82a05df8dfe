"""The processes of a run, seen from outside: found by a mark in their environment, told apart by their command line."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

MARK = "HEADWAY_SOAK"  # environment variable that every process of a soak inherits
ROLES = {"workers.learner": "learner", "workers.sampler": "sampler", "pipeline.environments.process": "environment"}


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it was seen. created: when it began, which tells it from a later one with its number."""

    pid: int
    created: float
    role: str  # supervisor, learner, sampler, environment, keeper (of a worker), other

    def is_alive(self) -> bool:
        """Whether this very process still runs; one that only waits to be reaped does not."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def send(self, number: int) -> bool:
        """Send a signal; False if it was gone."""
        try:
            process = psutil.Process(self.pid)
            if process.create_time() != self.created:
                return False
            process.send_signal(number)
            return True
        except psutil.Error:
            return False


@dataclass(frozen=True, slots=True)
class Use:
    """What a process holds at one moment."""

    rss_bytes: int  # pages in memory, those of shared blocks among them
    descriptors: int
    threads: int


def processes_of(mark: str) -> list[Seen]:
    """All that run, wherever they hang in the tree, but those that only wait to be reaped."""
    wanted = os.fsencode(f"{MARK}={mark}")
    found = []
    for process in psutil.process_iter():
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(Seen(process.pid, process.create_time(), role_of(process.cmdline())))
        except (OSError, psutil.Error):  # gone meanwhile, or another user's
            continue
    return found


def role_of(command: list[str]) -> str:
    """By the command line: of a worker the module that it runs."""
    if any(word.endswith("run.py") for word in command[:3]):
        return "supervisor"
    role = next((role for module, role in ROLES.items() if module in command), "other")
    is_keeper = role != "other" and any(word.endswith("keeper.py") for word in command[:5])
    return "keeper" if is_keeper else role


def use_of(process: Seen) -> Use | None:
    """None if it is gone."""
    try:
        found = psutil.Process(process.pid)
        with found.oneshot():
            return Use(found.memory_info().rss, found.num_fds(), found.num_threads())
    except psutil.Error:
        return None


def alive(processes: Iterable[Seen]) -> list[Seen]:
    return [process for process in processes if process.is_alive()]
