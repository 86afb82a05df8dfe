"""One `headway eval` of the command line: from a checked EvalConfig to a line of results and an exit code."""

import asyncio
import contextlib
import time
from pathlib import Path

from pipeline.commands.eval_config import EvalConfig
from pipeline.commands.parts import engine_of, supervisor_of, tell_endpoint
from pipeline.commands.signals import EXIT_CODES, Signals, ignore_signals
from pipeline.commands.workload import Workload, open_workload
from pipeline.dataset import rows_digest
from pipeline.errors import ConfigError
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.evaluation.without_training import EvaluationRun
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.run_dir.run_directory import make_default_run_dir, make_run_dir
from pipeline.user_warnings import warn
from pipeline.wording import label

REPORT_SECONDS = 10.0


def evaluate(config: EvalConfig) -> int:
    """Measure, showing how it goes. Returns 0 with a result, 129, 130 or 143 after a signal."""
    try:
        workload = open_workload(config.workload)
        with supervisor_of(config, init=config.weights) as model:
            engine = engine_of(model, workload, config.engine)
            run = make_evaluation(engine, config, workload)
            return asyncio.run(_evaluate(run, engine, config, workload))
    finally:
        ignore_signals()


def make_evaluation(engine: RolloutEngine, config: EvalConfig, workload: Workload) -> EvaluationRun:
    """On the first of the workload's held-out rows, or of all. Raises ConfigError before anything starts."""
    rows = workload.rows_to_measure(config.eval_rows, label(config, "eval_rows"), only_holdout=config.only_holdout)
    if not rows:
        raise ConfigError(
            f"{config.weights} has held no rows out, and trained on all others; name rows to measure by --data FILE."
        )
    warn_of_changed_data(config, workload)
    evaluator = Evaluator(rows, every=0, final_group_size=config.eval_group_size)
    return EvaluationRun(engine, evaluator, version=config.version)


def warn_of_changed_data(config: EvalConfig, workload: Workload) -> None:
    """Where the held-out rows are no longer those that the run held out."""
    for part in workload.parts:
        found = rows_digest(part.holdout_rows)
        if config.holdout_digests.get(part.name, found) != found:
            warn(
                f"The held-out rows of {part.name} are not those of the run any more, as its data has changed: it may "
                "have trained on some that are measured now."
            )


async def _evaluate(run: EvaluationRun, engine: RolloutEngine, config: EvalConfig, workload: Workload) -> int:
    signals, source = Signals(run), engine.model.source
    description = config.to_json() | {"workload": workload.describe(), "model": source.describe()}
    if config.run_dir is None:
        directory = make_default_run_dir("eval", time.localtime(), description)
    else:
        directory = make_run_dir(config.run_dir, description)
    watching = asyncio.create_task(_watch(run, workload.name))
    telling = asyncio.create_task(tell_endpoint(engine, lambda: directory, lambda text: print(text, flush=True)))
    try:
        with contextlib.suppress(asyncio.CancelledError):  # by the second signal
            result = await run.run(directory)
            if result is not None:
                print(result_line(result, workload.name, source.weights, held_out=config.workload.holds_out))
                print(f"files: {directory}")
                return 0
    finally:
        ignore_signals()
        watching.cancel()
        telling.cancel()
    print(f"stopped without a result; files: {directory}")
    return EXIT_CODES[signals.received]


async def _watch(run: EvaluationRun, name: str) -> None:
    """Tell now and then how far it is."""
    with contextlib.suppress(BrokenPipeError):  # the result's line raises it, too
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            done = run.rows_done
            print("eval: starting" if done is None else f"eval: {done} rows of {name} finished", flush=True)


def result_line(result: Evaluation, name: str, weights: str | Path | None, *, held_out: bool) -> str:
    """`reward 0.431 ± 0.012, …`: what was measured, on what, of which weights."""
    return (
        f"reward {result.reward_mean:.4f} ± {result.reward_stderr:.4f} (standard error), deviation "
        f"{result.reward_std:.4f}; {result.generated_tokens_mean:.1f} tokens a trajectory, "
        f"{100 * result.truncated_frac:.1f} % truncated; {result.trajectories} trajectories on {result.rows} "
        f"{'held-out ' if held_out else ''}rows of {name}, version {result.version} of {weights}"
    )
