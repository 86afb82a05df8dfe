"""A small chat-completions endpoint whose answers a test writes down."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from aiohttp import web


class ScriptedEndpoint:
    """Answers in turn, and then from the first again: a text is said, a list is tool calls, a dict is refused with 400,
    None takes forever.
    """

    def __init__(self, *answers: str | list | dict | None) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict]] = []  # Authorization, body

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[str]:
        """Its base_url."""
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        try:
            yield f"http://{host}:{port}/v1"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = self.answers[len(self.asked) % len(self.answers)]
        self.asked.append((request.headers["Authorization"], body))
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, dict):
            return web.json_response(said, status=400)
        calls = said if isinstance(said, list) else None
        message = {"role": "assistant", "content": None if calls else said, "refusal": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )


def tool_call(name: str, **arguments: object) -> dict:
    """As OpenAI writes it."""
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
