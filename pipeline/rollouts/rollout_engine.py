"""RolloutEngine: what users give to an `AsyncTrainer`: what is rolled out, on which model, within what limits."""

from collections.abc import Mapping
from typing import Any

from pipeline.adapters.verifiers_endpoint import verifiers_endpoint
from pipeline.config import Budget, KVCache, Schedule
from pipeline.config_checks import refuse_unknown
from pipeline.endpoint.openai_endpoint import OpenAIEndpoint
from pipeline.env import Env
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.single_turn import Reward
from pipeline.supervisor import Supervisor
from pipeline.trainer_config import EngineConfig
from pipeline.user_code.source import EnvSource, single_turn_source
from pipeline.wording import shown


class RolloutEngine:
    """Rolls out trajectories of one environment on one model; give it to an `AsyncTrainer`.

    env: an `Env` class, its path `module:Class` or `path/to/file.py:Class`; env_arguments are its keyword arguments,
    plain values. A mapping from names to such is a mix: each row's "environment" names its own, and env_arguments are
    by name, too. Or `verifiers:TASKSET`, or an `OpenAIEndpoint`, through which agents drive the rollouts. reward, in
    place of env: a function `reward(text, row)` of one turn, or its path; `SingleTurn` is then the environment. The
    other options are those of `EngineConfig`. Raises ConfigError for what does not fit together.
    """

    def __init__(
        self,
        model: Supervisor,
        env: type[Env] | str | Mapping[str, type[Env] | str] | OpenAIEndpoint | None = None,
        *,
        reward: Reward | str | None = None,
        schedule: Schedule | None = None,
        budget: Budget | None = None,
        env_arguments: dict[str, Any] | None = None,
        kv_cache: KVCache | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown(RolloutEngine, EngineConfig, options)
        if not isinstance(model, Supervisor):
            raise ConfigTypeError(f"model is {shown(model)}; give an rl.Supervisor.")
        self.model = model
        if (env is None) == (reward is None):
            raise ConfigTypeError(
                f"env is {shown(env)} and reward is {shown(reward)}; give the one or the other: an environment, or a "
                "function reward(text, row) of one turn."
            )
        taskset = verifiers_endpoint(env, env_arguments)
        if taskset is not None:
            self.env: EnvSource = taskset
        elif isinstance(env, OpenAIEndpoint):
            if env_arguments is not None:
                raise ConfigError(
                    "env_arguments is given, but env is an OpenAIEndpoint, which takes none; leave it out."
                )
            self.env = env
        elif reward is not None:
            self.env = single_turn_source(reward, {} if env_arguments is None else env_arguments)
        else:
            self.env = EnvSource(env, {} if env_arguments is None else env_arguments)
        self.config = EngineConfig(
            schedule=Schedule() if schedule is None else schedule,
            budget=Budget() if budget is None else budget,
            kv_cache=KVCache() if kv_cache is None else kv_cache,
            **options,
        )
        if isinstance(self.env, OpenAIEndpoint):
            self.env.check(self.config.budget)
        if self.config.environment_processes is not None and not self.env.runs_in_processes:
            why = (
                "runs in a thread of this process, since no other one can import it: put its class into a module of "
                "its own"
                if self.env.runs_in_thread
                else "runs nothing here: its harness is elsewhere"
            )
            raise ConfigError(
                f"environment_processes is {self.config.environment_processes}, but this environment {why}, or leave "
                "environment_processes out."
            )
