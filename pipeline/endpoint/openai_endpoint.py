"""OpenAIEndpoint: given to a `RolloutEngine` in place of an environment, it lets agents drive the rollouts."""

import asyncio
import importlib.util
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Budget
from pipeline.config_checks import check_integer, check_number
from pipeline.endpoint.chat_request import Served
from pipeline.endpoint.sessions import TOKEN_BYTES, Sessions
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.run_dir.run_files import ENDPOINT
from pipeline.user_code.named import checked_path
from pipeline.user_code.source import EnvSource
from pipeline.wording import shown

if TYPE_CHECKING:
    from pipeline.endpoint.server import EndpointServer

AGENT_ENV = "pipeline.endpoint.agent_env:AgentEnv"
NO_TIMEOUT = 1e9  # seconds; an agent's one call has no limit but idle_timeout


class OpenAIEndpoint(EnvSource):
    """Agents that speak OpenAI's chat completions drive the rollouts, and say what they are worth.

    agent: `module:function` (or `file.py:function`); Headway calls `await function(row, base_url, api_key)` for each
    rollout, in an environment process (a plain function in a thread), and what it returns is the reward, or
    `{"reward": …, "metrics": {…}}`. None: a harness of your own asks for rollouts (docs/endpoint.md). port: 0 for any
    that is free. idle_timeout: seconds without a request or a reward, after which a rollout fails. api_key: the
    harness's token, at least 16 characters; None: made anew. model_name: what requests must name. Raises ConfigError
    or ConfigTypeError.
    """

    LABEL = "OpenAIEndpoint"

    def __init__(
        self,
        agent: str | None = None,
        *,
        port: int = 0,
        idle_timeout: float = 600.0,
        api_key: str | None = None,
        model_name: str = "headway",
    ) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(
                "OpenAIEndpoint needs the package aiohttp, which isn't installed; install the extra: "
                "pip install -e '.[endpoint]' in the checkout."
            )
        if agent is not None and not isinstance(agent, str):
            raise ConfigTypeError(
                f"OpenAIEndpoint.agent is {shown(agent)}; an agent runs in a process of its own, so it is named: "
                "module:function."
            )
        if agent is None:
            self.parts, self.is_mix = {}, False
        else:
            super().__init__(*self._environment_of(agent))
        self.agent = agent
        self.port = port
        check_integer(self, "port", minimum=0, maximum=65535, unit="the ports of this machine (0: any that is free)")
        self.idle_timeout = idle_timeout
        check_number(self, "idle_timeout", above=0.0)
        if api_key is not None and (not isinstance(api_key, str) or len(api_key) < 16 or not api_key.isascii()):
            raise ConfigError(
                "OpenAIEndpoint.api_key is no text of at least 16 ASCII characters; name a longer one, or leave it out."
            )
        if api_key is not None and agent is not None:
            raise ConfigError(
                "OpenAIEndpoint.api_key is what a harness asks for rollouts with, but agent is given, which Headway "
                "calls itself; leave one of them out."
            )
        self.api_key = secrets.token_urlsafe(TOKEN_BYTES) if api_key is None else api_key
        if not isinstance(model_name, str) or not model_name:
            raise ConfigError(f"OpenAIEndpoint.model_name is {shown(model_name)}; it is a text.")
        self.model_name = model_name
        self._server: EndpointServer | None = None

    @property
    def url(self) -> str | None:
        """Where `POST /rollouts` goes, while a run is under way."""
        return None if self._server is None or self._server.is_over else self._server.url

    def check(self, budget: Budget) -> None:
        """Raise ConfigError for limits that have no meaning where an agent says what the model reads."""
        for name, default in (("final_answer_reserve", 0), ("tool_output_tokens", Budget().tool_output_tokens)):
            if getattr(budget, name) != default:
                raise ConfigError(
                    f"Budget.{name} is {getattr(budget, name)}, but with an OpenAIEndpoint the agent alone says what "
                    "the model reads, so it would have no effect; leave it out."
                )

    def _environment_of(self, agent: str) -> tuple[str, dict[str, Any]]:
        """What runs the agent, and its arguments: an environment with a single turn, told `row`, `base_url` and
        `api_key`.
        """
        return AGENT_ENV, {"agent": checked_path(agent, "agent", "my_agents:solve", or_itself=False)}

    def start_config(self, timeout: float, max_tool_chars: int | None) -> dict[str, Any]:
        """What an environment process is told."""
        # try_first, after a restart too: what the agent's module imports, which takes seconds, holds up no call then.
        return super().start_config(NO_TIMEOUT, max_tool_chars) | {"try_first": True}

    def call_timeout(self, timeout: float) -> float:
        return NO_TIMEOUT

    def silence_timeout(self, timeout: float) -> float:
        """Half of idle_timeout: who lets no other agent run is ended before the others are idle for too long."""
        return self.idle_timeout / 2

    async def serve(
        self, sampling: dict[str, Any], run_dir: Path, on_error: Callable[[Exception], None]
    ) -> "EndpointServer":
        """The server of one run. sampling: temperature, top_p, top_k. on_error gets what goes wrong in its code."""
        from pipeline.endpoint.server import EndpointServer  # aiohttp, an extra

        server = EndpointServer(
            port=self.port,
            key=self.api_key,
            calls_agents=self.agent is not None,
            idle_timeout=self.idle_timeout,
            served=Served(self.model_name, sampling["temperature"], sampling["top_p"], sampling["top_k"]),
            sessions=Sessions(asyncio.get_running_loop().time),
            on_error=on_error,
            address_file=None if self.agent is not None else run_dir / ENDPOINT,
        )
        await server.start()
        self._server = server
        return server
