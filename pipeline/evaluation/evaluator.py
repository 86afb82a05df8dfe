"""Evaluator: what users ask for, held-out rows measured while training goes on; and Evaluation, what one measured.

Plain values and rules; `evaluations.py` runs them.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pipeline.config_checks import check_integer, is_plain_function
from pipeline.dataset import check_rows, rows_digest
from pipeline.errors import ConfigError, ConfigTypeError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one evaluation measured: rewards as scored, tokens and truncations over all of its trajectories.

    version: the policy measured. batch: batches finished when it was launched. seconds: wall-clock, to the last result.
    """

    version: int
    batch: int
    rows: int
    trajectories: int
    reward_mean: float
    reward_std: float  # of the population
    reward_stderr: float  # of the mean, from the means of the rows: trajectories of one row are no independent samples
    generated_tokens_mean: float
    truncated_frac: float  # share of trajectories that a limit ended
    seconds: float
    # In order: "row" (index), "id" and "environment" if it has them, "reward_mean".
    row_rewards: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates `holdout` rows beside training; give it to an `AsyncTrainer`.

    Launched before the first batch, after every `every`-th one (0: never), and at the end with `final_group_size`
    trajectories a row instead of `group_size` (0: no evaluation of its own for the end). Rows that equal a held-out one
    are left out of training. `sink(evaluation)` is called in the trainer's loop with each result; what it raises stops
    the run. Raises ConfigError or ConfigTypeError.
    """

    holdout: Sequence[dict[str, Any]]
    _: KW_ONLY
    every: int = 20
    group_size: int = 4
    final_group_size: int = 8
    sink: Callable[[Evaluation], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.holdout, Sequence) or isinstance(self.holdout, str | bytes):
            raise ConfigTypeError(f"Evaluator.holdout is {type(self.holdout).__name__}; give a list of dicts.")
        if not self.holdout:
            raise ConfigError("Evaluator.holdout is empty; give at least one row, or leave the evaluator out.")
        check_rows(self.holdout, "Holdout row")
        check_integer(self, "every", minimum=0, unit="batches between evaluations (0: only at the end)")
        check_integer(self, "group_size", minimum=1, unit="trajectories per held-out row")
        check_integer(self, "final_group_size", minimum=0, unit="trajectories per held-out row at the end")
        if self.every == 0 and self.final_group_size == 0:
            raise ConfigError(
                "Evaluator.every and Evaluator.final_group_size are both 0, so nothing would ever be evaluated; "
                "set one of them, or leave the evaluator out."
            )
        if self.sink is not None and not is_plain_function(self.sink):
            raise ConfigTypeError(f"Evaluator.sink is {self.sink!r:.100}; give a plain function, or leave it out.")

    def trajectories_per_row(self, batches: int, *, at_end: bool) -> int:
        """Of the evaluation that is due when `batches` are finished; 0: none is. at_end: no batch follows."""
        if at_end and self.final_group_size:
            return self.final_group_size
        return self.group_size if self.every and batches % self.every == 0 else 0

    def describe(self) -> dict[str, Any]:
        """Its options as config.json records them; of the rows their number and what tells them from others."""
        return {
            "class": "Evaluator",
            "holdout_rows": len(self.holdout),
            "holdout_digest": rows_digest(self.holdout),
            "every": self.every,
            "group_size": self.group_size,
            "final_group_size": self.final_group_size,
        }
