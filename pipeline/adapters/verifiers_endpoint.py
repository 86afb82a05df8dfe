"""`verifiers:TASKSET` as what an engine rolls out: an endpoint whose agent is an episode of the taskset."""

from collections.abc import Mapping
from typing import Any

from pipeline.endpoint.openai_endpoint import OpenAIEndpoint
from pipeline.errors import ConfigError

PACKAGE = "verifiers"


class VerifiersEndpoint(OpenAIEndpoint):
    """env: `verifiers:TASKSET`. arguments: those of `pipeline.adapters.verifiers.Verifiers`. Raises ConfigError."""

    LABEL = "verifiers"

    def __init__(self, env: str, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        super().__init__(agent=env)

    def _environment_of(self, agent: str) -> tuple[str, dict[str, Any]]:
        return agent, self._arguments


def verifiers_endpoint(env: Any, arguments: dict[str, Any] | None) -> VerifiersEndpoint | None:
    """The endpoint of an engine's `env` if that is `verifiers:TASKSET`; None if it is anything else. Raises ConfigError
    for a mix with such a part: its other environments would not ask the endpoint.
    """
    if isinstance(env, Mapping):
        for name, part in env.items():
            if _names_a_taskset(part):
                raise ConfigError(
                    f"env[{name!r}] is {part!r}, but a taskset of verifiers can't be part of a mix; train on it alone."
                )
    return VerifiersEndpoint(env, arguments or {}) if _names_a_taskset(env) else None


def _names_a_taskset(env: Any) -> bool:
    package, colon, name = env.partition(":") if isinstance(env, str) else ("", "", "")
    return package == PACKAGE and bool(name)
