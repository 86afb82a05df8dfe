"""AgentEnv: one run of a user's agent, as an environment with a single turn: the agent's whole run.

So an agent has what environments have: a process that can be ended, its failures named, its output in the run's logs.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config_checks import check_parameters
from pipeline.env import Env, TrajectoryView, TurnResult
from pipeline.environments.tool_threads import TOOL_THREADS
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.named import find_named

PARAMETERS = ("row", "base_url", "api_key")


class AgentEnv(Env):
    """agent: `module:function`."""

    def __init__(self, agent: str) -> None:
        self._agent = find_agent(agent)
        self._told: dict[str, Any] = {}
        self._reward: Any = None

    def reset(self, row: dict[str, Any]) -> str:
        """row: what the agent is called with."""
        self._told = row
        return "An agent says what the model reads."

    async def on_turn(self, traj: TrajectoryView) -> TurnResult:
        call = functools.partial(self._agent, *(self._told[name] for name in PARAMETERS))
        # A plain function waits for its answers on a thread of its own: here it would hold up all others.
        outcome = await (call() if inspect.iscoroutinefunction(self._agent) else TOOL_THREADS.run(call))
        if inspect.isawaitable(outcome):
            outcome = await outcome
        metrics: Any = {}
        if isinstance(outcome, Mapping):
            unknown = [name for name in outcome if name not in ("reward", "metrics")]
            if unknown or "reward" not in outcome:
                raise TypeError(
                    f"the agent returned {outcome!r:.200}; it returns a number, or a dict of reward and metrics"
                )
            outcome, metrics = outcome["reward"], outcome.get("metrics") or {}
            if not isinstance(metrics, Mapping):
                raise TypeError(f"the agent's metrics are {metrics!r:.200}; they are numbers by name")
        self._reward = outcome
        return TurnResult(done=True, metrics=metrics)

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> Any:
        """Checked as any environment's: None or a text is no number."""
        return self._reward


def find_agent(path: str) -> Callable:
    """The function at `path`; ConfigError in a sentence if there is none."""
    found = find_named(path, "agent", "my_agents:solve")
    if not callable(found):
        raise ConfigError(f"The agent {path!r} is {found!r:.100}, which can't be called; name a function.")
    try:
        check_parameters(found, len(PARAMETERS), f"The agent {path!r}", f"agent({', '.join(PARAMETERS)})")
    except ConfigTypeError as error:
        raise ConfigError(str(error)) from error
    return found
