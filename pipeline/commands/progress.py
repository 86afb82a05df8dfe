"""What a user sees of a run: one live line on a terminal, plain lines elsewhere, and a summary at its end."""

import asyncio
import contextlib
import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from os import PathLike

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.checkpoints.saved import goes_on_from_start
from pipeline.evaluation.evaluator import Evaluation
from pipeline.run_dir.run_files import CHECKPOINTS, CONFIG, EVALUATIONS, EVENTS, JOURNAL, LOGS, METRICS, TRAJECTORIES
from shm.errors import HeadwayError

WAIT_SECONDS = 10.0  # without a plain line, after which one tells whom the trainer waits for
PLAIN_SECONDS = 2.0  # least time between two plain lines; the first and the last step always have one
SPEED_STEPS = 20  # steps that the shown speed is measured over
FILES = {  # what a run directory may hold that a user wants to open
    METRICS: "one line per step",
    TRAJECTORIES: "what the model read and wrote: --log-trajectories of each batch",
    EVENTS: "the audit log: headway audit RUN_DIR",
    CONFIG: "the configuration as it was used",
    EVALUATIONS: "evaluations",
    CHECKPOINTS: "the weights: headway export RUN_DIR OUT_DIR",
    JOURNAL: "what was decided since: what --resume goes on from",
    LOGS: "one file per process",
}


class _Console(Console):
    """Raises BrokenPipeError when its reader is gone (`… | head`), where rich would end the process from within."""

    def on_broken_pipe(self) -> None:
        raise  # called while the BrokenPipeError is handled


class Progress:
    """Shows steps as they are trained. Writes to stdout only; `close`, or `end`, must be called."""

    def __init__(
        self,
        *,
        steps: int,
        mode: str,
        concurrency: int,
        waits_for: Callable[[], str] = lambda: "",
        steps_before: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """concurrency: the trajectories asked for, shown beside those achieved. waits_for: whom the trainer waits for
        now, "" for nobody; called from rich's thread too. steps_before: those that were trained before this resume.
        """
        self._steps = steps
        self._mode = mode
        self._waits_for = waits_for
        self._console = console or _Console(highlight=False)
        self._clock = clock
        self._began = clock()
        self._times: deque[float] = deque(maxlen=SPEED_STEPS + 1)  # ends of steps: start-up is no step's time
        self._rewards: list[float] = []
        self._without_gradient = 0  # batches
        self._concurrency = concurrency
        self._running_seconds = 0.0  # of all trajectories together
        self._sampling_seconds = 0.0
        self._shown = self._began  # when the last plain line was printed
        self._steps_before = self._done = steps_before  # of the run: the latest step
        self._line = f"{mode}: starting" if not steps_before else f"{mode}: resuming after step {steps_before}"
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=5)
            self._live.start()

    def tell(self, text: str) -> None:
        """A line of its own, which stays."""
        self._print(text)

    def show(self, n: int, metrics: Mapping[str, float]) -> None:
        """Batch `n` (from 1) has been trained, with these metrics."""
        now = self._clock()
        self._done = n
        self._times.append(now)
        self._rewards.append(metrics.get("reward/mean", float("nan")))
        self._without_gradient += metrics.get("train/updated") == 0
        interval = metrics.get("sampling/interval_seconds", 0.0)
        self._sampling_seconds += interval
        self._running_seconds += interval * metrics.get("sampling/concurrency_mean", 0.0)
        speed = (len(self._times) - 1) / max(self._times[-1] - self._times[0], 1e-9)  # 0: one step has none yet
        self._line = step_line(self._mode, n, self._steps, speed, metrics)
        if self._live is None and (n in (self._steps_before + 1, self._steps) or now - self._shown >= PLAIN_SECONDS):
            self._shown = now
            self._print(self._with_wait())

    async def watch(self) -> None:
        """`remind` once a second, until cancelled: a run that stalls shows no step that could tell of it."""
        with contextlib.suppress(BrokenPipeError):  # `show` raises it, too, where the run can be ended in order
            while True:
                await asyncio.sleep(1.0)
                self.remind()

    def remind(self) -> None:
        """Where no live line does it: tell whom the trainer waits for, if nothing was told for WAIT_SECONDS."""
        now = self._clock()
        if self._live is None and now - self._shown >= WAIT_SECONDS and self._waits_for():
            self._shown = now
            self._print(self._with_wait())

    def close(
        self,
        status: str,
        run_dir: str | PathLike[str] | None,
        evaluation: Evaluation | None = None,
        checkpoint: str | PathLike[str] | None = None,
        *,
        left_unsaved: bool = False,
    ) -> None:
        """Print the summary. status: completed, stopped or failed; run_dir: None if it was never made; evaluation: the
        latest, None if there was none; checkpoint: where the weights were saved, None if they were not; left_unsaved:
        there were later ones, which went with the learner. Raises OSError when nobody reads them any more or
        a disk is full, unless status is failed.
        """
        try:
            self.end()
            if status == "failed" and run_dir is None:
                return  # refused before anything began: the error says it all
            for line in self._summary(status, run_dir, evaluation, checkpoint, left_unsaved):
                self._print(line)
        except OSError:
            if status != "failed":  # else an error is on its way, which none may hide
                raise

    def _summary(
        self,
        status: str,
        run_dir: str | PathLike[str] | None,
        evaluation: Evaluation | None,
        checkpoint: str | PathLike[str] | None,
        left_unsaved: bool,
    ) -> Iterator[str]:
        seconds = self._clock() - self._began
        done = len(self._rewards)
        since = f", {done} of them since the resume," if self._steps_before else ""
        yield f"{status} after {self._done} of {self._steps} steps{since} in {seconds:.1f} s"
        if done:
            first, last = self._rewards[:10], self._rewards[-20:]
            yield (
                f"reward: {_mean(first):.3f} over the first {len(first)} steps, {_mean(last):.3f} over the last "
                f"{len(last)}; {_speed(done / max(seconds, 1e-9))}"
            )
        if self._without_gradient:
            yield (
                f"no gradient: {self._without_gradient} of {done} batches left the weights as they were "
                "(equal rewards in each group)"
            )
        if evaluation is not None:
            yield (
                f"evaluation: reward {evaluation.reward_mean:.3f} of {evaluation.trajectories} trajectories on "
                f"{evaluation.rows} held-out rows, at version {evaluation.version}"
            )
        if self._sampling_seconds > 0:
            running = self._running_seconds / self._sampling_seconds
            yield f"concurrency: {running:.1f} trajectories on average, of {self._concurrency} asked for"
        if checkpoint is not None:
            yield f"checkpoint: {checkpoint}"
        if left_unsaved:
            yield (
                "the learner was gone when the run was to end, and was not waited for: what it had trained since its "
                "last checkpoint is in the journal, and is trained again when the run is resumed"
            )
        if status != "completed" and (checkpoint is not None or _goes_on_from_start(run_dir)):
            yield f"to go on: python run.py --resume {shlex.quote(str(run_dir))}"
        if run_dir is not None and os.path.isdir(run_dir):
            yield f"files: {run_dir}"
            for name, purpose in FILES.items():
                if os.path.exists(os.path.join(run_dir, name)):
                    yield f"  {name:<14} {purpose}"

    def end(self) -> None:
        """No live line from here on."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Text:
        # In a long wait its end is what counts: rather two lines than one that is cut.
        return Text(self._with_wait(), no_wrap=self._seconds_since_step() < WAIT_SECONDS, overflow="ellipsis")

    def _with_wait(self) -> str:
        waits_for = self._waits_for()
        if not waits_for:
            return self._line
        seconds = self._seconds_since_step()
        since = f"step {self._done}" if self._rewards else "the start"
        lasts = f" | {seconds:.0f} s since {since}" if seconds >= WAIT_SECONDS else ""
        return f"{self._line} | waits: {waits_for}{lasts}"

    def _seconds_since_step(self) -> float:
        """Since the latest step, or the start."""
        return self._clock() - (self._times[-1] if self._times else self._began)

    def _print(self, text: str) -> None:
        # Neither wrapped nor read as markup: a line is a line, also in a file.
        self._console.print(Text(text), soft_wrap=True)


def _goes_on_from_start(run_dir: str | PathLike[str] | None) -> bool:
    """And whether anybody can see that: what can't be read is told when the run is resumed."""
    try:
        return run_dir is not None and goes_on_from_start(run_dir)
    except (HeadwayError, OSError):
        return False


def step_line(mode: str, n: int, steps: int, speed: float, metrics: Mapping[str, float]) -> str:
    """`async 12/400 | reward 0.41 | 4.3 steps/s | 5120 tokens/s | age p50 1 p99 2 max 2 | bound waited 0.0 s`."""
    parts = [f"{mode} {n}/{steps}"]
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if speed > 0.0:
        parts.append(_speed(speed))
    if "sampling/generated_tokens_per_second" in metrics:
        parts.append(f"{metrics['sampling/generated_tokens_per_second']:.0f} tokens/s")
    ages = [
        f"{label} {metrics[f'staleness/span_age_{label}']:g}"
        for label in ("p50", "p99", "max")
        if f"staleness/span_age_{label}" in metrics
    ]
    if ages:
        parts.append("age " + " ".join(ages))
    if "staleness/wait_seconds" in metrics:
        parts.append(f"bound waited {metrics['staleness/wait_seconds']:.2f} s")
    return " | ".join(parts)


def _speed(steps_per_second: float) -> str:
    """A step of a real model may take minutes."""
    return f"{steps_per_second:.2f} steps/s" if steps_per_second >= 0.1 else f"{1.0 / steps_per_second:.0f} s/step"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
