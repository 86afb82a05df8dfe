"""What a run is to do, settled before it has a directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluation.evaluator import Evaluator
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.run_spec import RunSpec
from pipeline.schedule import ScheduleRules
from pipeline.trainer_config import TrainerConfig
from pipeline.training.training_loop import ValidateBatch


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All of it is checked. rows: to train, without those that are held out. recipe: what config.json says, plain
    values. evaluator, validate_batch: None if nothing is measured, or looked at.
    """

    engine: RolloutEngine
    config: TrainerConfig
    spec: RunSpec
    rules: ScheduleRules
    rows: Sequence[dict[str, Any]]
    recipe: Mapping[str, Any]
    evaluator: Evaluator | None
    validate_batch: ValidateBatch | None
