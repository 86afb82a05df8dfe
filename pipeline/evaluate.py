"""Evaluation on held-out rows, through the run's own samplers, pinned to one policy version."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.active_run import ActiveRun
from pipeline.config_checks import check_integer
from pipeline.errors import ConfigTypeError
from pipeline.rendering import ChatFormat
from pipeline.rollout_log import RolloutLog
from pipeline.rollouts import Rollouts
from pipeline.sampling_counters import SamplingCounters
from pipeline.schedule import Admission
from pipeline.trainer_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalEvaluation:
    """After the last step: `group_size` trajectories of each row under the final weights."""

    rows: Sequence[dict[str, Any]]
    group_size: int = 8

    def __post_init__(self) -> None:
        if not self.rows or not all(isinstance(row, dict) for row in self.rows):
            raise ConfigTypeError("FinalEvaluation.rows must be a list of at least one dict.")
        check_integer(self, "group_size", minimum=1, unit="trajectories per row")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation measured, and at which policy version."""

    version: int
    rows: int
    trajectories: int
    reward_mean: float
    reward_std: float
    generated_tokens_mean: float
    truncated_frac: float


async def evaluate(
    plan: FinalEvaluation, engine: EngineConfig, run: ActiveRun, chat: ChatFormat, directory: Path
) -> Evaluation:
    """Measure the committed version; adds a line to eval.jsonl and an `evaluation` event."""
    version = run.version
    expected = len(plan.rows)
    rollouts = Rollouts(
        engine,
        run,
        chat,
        plan.rows,
        plan.group_size,
        RolloutLog(None, SamplingCounters()),
        concurrency=engine.schedule.concurrency,
        pinned=version,
    )
    run.slots.lease(version)  # over the whole evaluation, not only while one of its trajectories runs
    try:
        rollouts.start([Admission(-1 - index, index, version) for index in range(expected)])  # beside no training group
        trajectories = []
        for _ in range(expected):
            result = await rollouts.completed.get()  # ends with the run at the latest: its failure comes out here too
            if isinstance(result, BaseException):
                raise result
            trajectories += result.trajectories
    finally:
        await rollouts.stop()
        run.release(version)
    rewards = np.array([one.reward for one in trajectories])
    evaluation = Evaluation(
        version=version,
        rows=expected,
        trajectories=len(trajectories),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        generated_tokens_mean=float(np.mean([one.generated_tokens for one in trajectories])),
        truncated_frac=float(np.mean([one.truncated is not None for one in trajectories])),
    )
    with open(directory / "eval.jsonl", "a", encoding="utf-8") as file:
        values = {name: getattr(evaluation, name) for name in Evaluation.__slots__}
        file.write(json.dumps(values) + "\n")
    run.events.log("evaluation", version=version, rows=expected, status="completed", reward_mean=evaluation.reward_mean)
    return evaluation
