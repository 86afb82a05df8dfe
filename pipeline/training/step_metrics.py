"""What a step reports beside what the batch and the learner say of themselves: schedule, waits, sampling, sums."""

from collections import Counter
from collections.abc import Sequence

from pipeline.processes.active_run import ActiveRun
from pipeline.processes.process_metrics import TimeAccount, WorkerTimes, memory_metrics
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.schedule import Scheduler
from pipeline.stalls.waits import Waits
from pipeline.training.intake import Intake
from pipeline.training.received import Received
from pipeline.trajectory import Group


class StepMetrics:
    """Differences since the previous step are taken here."""

    def __init__(
        self,
        run: ActiveRun,
        scheduler: Scheduler,
        intake: Intake,
        received: Received,
        waits: Waits,
        counters: SamplingCounters,
        time_account: TimeAccount,
    ) -> None:
        self._run = run
        self._scheduler = scheduler
        self._intake = intake
        self._received = received
        self._waits = waits
        self._counters = counters
        self._time_account = time_account
        self._worker_times = WorkerTimes(run.time_rows)
        self._restarts_told = self._log_cuts_told = 0
        self._given_up_told: Counter[str] = Counter()

    def take(self, groups: Sequence[Group]) -> dict[str, float]:
        """After a batch of `groups`; the next call counts from here."""
        waits = self._waits
        restarts, self._restarts_told = self._run.num_restarts - self._restarts_told, self._run.num_restarts
        log_cuts, self._log_cuts_told = self._run.num_log_cuts - self._log_cuts_told, self._run.num_log_cuts
        given_up = self._intake.given_up - self._given_up_told
        self._given_up_told = self._intake.given_up.copy()
        return {
            "staleness/wait_seconds": waits.bound_seconds,
            "staleness/wait_count": waits.bound_count,
            "staleness/reserved_groups": self._scheduler.reserved_groups,
            **{f"staleness/wait_seconds/{cause}": seconds for cause, seconds in waits.by_cause.items()},
            "staleness/slot_wait_seconds": waits.slot_seconds,
            "groups/failed": given_up["failed"],
            "groups/filtered": given_up["filtered"],
            "groups/deadline_frac": sum(group.closed_by_deadline for group in groups) / len(groups),
            "groups/mean_wait_seconds": sum(group.seconds for group in groups) / len(groups),
            "throughput/queue_depth": self._intake.depth + len(self._received),
            "recovery/restarts": restarts,
            **self._counters.take(),
            "env/log_cuts": log_cuts,
            **({} if self._run.endpoint is None else self._run.endpoint.take_metrics()),
            "sampling/ready_prompts": sum(sampler.num_waiting for sampler in self._run.samplers),
            **self._time_account.take(),
            **self._worker_times.take(),
            **memory_metrics(self._run.workers.pids),
        }


def timing(metrics: dict[str, float], batch_seconds: float, seconds: float) -> dict[str, float]:
    """batch_seconds: from admission; seconds: from the batch's selection (with overlap: from admission, too)."""
    return {
        "train/batch_seconds": batch_seconds,
        "train/seconds": seconds,
        "train/tokens_per_second": metrics["train/tokens"] / max(batch_seconds, 1e-9),
    }
