"""The harness that plays a verifiers task in this process: chat completions, and the task's tools by MCP.

verifiers finds it as a module of its own (`verifiers_loading.HARNESS`). Its stock harnesses start a program with uv for
each rollout, which needs the network once and seconds each time.
"""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from pipeline.endpoint.refusal import NO_ROOM

__all__ = ["ChatHarness"]


KEPT = ("role", "content", "tool_calls")  # of the model's message: the rest says nothing to it


class ChatHarnessConfig(vf.HarnessConfig):
    """Nothing of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Asks for turns until one has no tool calls, or no room is left for another."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """endpoint, secret: verifiers' own server, which records each turn on its way to the run's endpoint."""
        messages = self._opening(data)
        spec = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # A turn takes as long as sampling does, so there is no time-out here.
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            tools, dispatch, servers = await connect_mcp({"mcpServers": spec}, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    text = await response.text()
                if response.status >= 400:
                    # Out of room, the episode ends as it is and is scored. For anything else verifiers knows the cause.
                    return vf.ProgramResult(0 if NO_ROOM in text else 1, "", text)
                message = json.loads(text)["choices"][0]["message"]
                messages.append({key: message[key] for key in KEPT if message.get(key) is not None})
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(0, "", "")
                for call in calls:
                    content = await self._answer(call["function"], dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *map(message_to_wire, prompt or [])]

    async def _answer(
        self, function: Mapping[str, str], dispatch: dict[str, tuple[str, str]], servers: dict[str, Any]
    ) -> str | list[dict[str, Any]]:
        """For the model: a tool's result, or what is wrong with the call. Raises what keeps a server from answering."""
        name = function["name"]
        if name not in dispatch:
            return f"error: there is no tool {name!r}"
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON ({error})"
        return await call_mcp(servers, dispatch, name, arguments)
