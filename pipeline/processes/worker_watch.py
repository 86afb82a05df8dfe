"""What a run does about samplers and the learner that stand still: one that has not moved its heartbeat is killed."""

import time

from pipeline.processes.run_blocks import LEARNER_ROW
from pipeline.processes.run_workers import RunWorkers
from shm.ledger import Ledger


class WorkerWatch:
    """For one run."""

    def __init__(self, workers: RunWorkers, ledger: Ledger, worker_timeout: float) -> None:
        """worker_timeout: seconds without a heartbeat after which a worker is killed."""
        self._workers = workers
        self._ledger = ledger
        self._timeout = worker_timeout

    def look(self) -> None:
        """Kill who is silent; their end is then told like any other death."""
        for row, handle in enumerate([self._workers.learner, *self._workers.samplers], LEARNER_ROW):
            beat = self._ledger.worker(row).read()
            silent = (time.monotonic_ns() - beat.heartbeat_ns) / 1e9
            if handle.started and beat.pid == handle.pid and beat.heartbeat_ns and silent > self._timeout:
                handle.kill()
