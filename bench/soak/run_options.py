"""How the soak's runs are started: run.py's options, for each way to train a finite data set."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT = f"{Path(__file__).resolve().with_name('errands.py')}:Errands"
GROUPS_PER_STEP = 4
COMMON = (
    *("--repeat-dataset", "false", "--group-size", "4", "--groups-per-step", str(GROUPS_PER_STEP)),
    *("--max-turn-tokens", "6", "--max-context-tokens", "1024", "--tool-output-tokens", "64", "--device", "cpu"),
    *("--environment-timeout", "5", "--worker-timeout", "20"),
    *("--max-restarts", "1000000", "--max-retries", "1000000", "--weights-every", "5", "--rollout-every", "1"),
)
# Each run of the soak takes the next way to train, and the next kind of recovery of its environment.
WAYS = {
    "async": ("--mode", "async"),
    "sync": ("--mode", "sync", "--overlap-min-sequences", "4"),
    "evaluated": ("--mode", "async", *("--holdout", "4", "--eval-every", "5"), "--keep-best", "1"),
    "ahead": ("--mode", "async", "--max-staleness", "4", "--admit-ahead", "4", "--batch-order", "admission"),
    "segments": ("--mode", "async", "--sampling-policy", "segment", "--kv-max-staleness", "1"),
}
HELD_OUT = {"evaluated": 4}  # rows beside those that are trained
RECOVERIES = ("drop", "stateless", "snapshot")


def run_options(
    way: str, model: Path, data: Path, num_rows: int, arguments: Mapping[str, Any], processes: int = 2
) -> list[str]:
    """Options of run.py, for one epoch of `num_rows` rows. arguments: of `Errands`. processes: samplers, and as many
    for environments.
    """
    return [
        *("--model", str(model), "--env", ENVIRONMENT, "--data", str(data)),
        *("--env-arguments", json.dumps(arguments), "--steps", str(-(-num_rows // GROUPS_PER_STEP))),
        *("--samplers", str(processes), "--environment-processes", str(processes), *COMMON, *WAYS[way]),
    ]
