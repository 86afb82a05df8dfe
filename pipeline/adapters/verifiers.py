"""Tasksets of the package `verifiers` as environments: `verifiers:NAME`.

A taskset's tasks are the rows. A rollout is one verifiers episode in an environment process, whose harness speaks chat
completions with the run's endpoint; its reward is the episode's. The package is an extra and takes seconds to import:
only environment processes and the probe load this file.
"""

from typing import Any

from pipeline.adapters.verifiers_episodes import Outcome, served
from pipeline.adapters.verifiers_loading import load_environment, rows_of
from pipeline.env import Env, TrajectoryView, TurnResult


class Verifiers(Env):
    """One episode. It has a single turn, in which verifiers plays: what the model reads, the endpoint is asked with.

    taskset: the name of an installed taskset, or of a module on the import path that has one. num_rows: only its first
    so many tasks. What else is given is the taskset's own config, as verifiers names it: `num_tasks`, `task`, ….
    """

    def __init__(self, taskset: str, num_rows: int | None = None, **config: Any) -> None:
        self._taskset = taskset
        self._config = config
        self._told: dict[str, Any] = {}
        self._outcome: Outcome | None = None

    @classmethod
    def rows(cls, seed: int, *, taskset: str, num_rows: int | None = None, **config: Any) -> list[dict[str, Any]]:
        """The taskset's tasks as plain values, in its order; the seed changes nothing. Raises ConfigError."""
        return rows_of(load_environment(taskset, config), num_rows)

    def reset(self, row: dict[str, Any]) -> str:
        """row: the task's `row`, and the `base_url` and `api_key` with which its episode asks for turns."""
        self._told = row
        return "The episode says what the model reads."

    async def on_turn(self, traj: TrajectoryView) -> TurnResult:
        environment = await served(self._taskset, self._config)
        self._outcome = await environment.play(self._told["row"], self._told["base_url"], self._told["api_key"])
        return TurnResult(done=True, metrics=self._outcome.metrics)

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float:
        return self._outcome.reward
