"""Episodes of a built-in task through its environment host, with turns that a test writes."""

import asyncio

from pipeline.chat.format import ModelTurn
from pipeline.environments.host import EnvironmentHost
from workers.messages import EnvironmentCall


def play(make_env, row, turns, chat=None):
    """The reply to `reset` and to each turn. turns: texts, or lists of calls; or functions from the replies so far to
    one of these. chat: the tiny format, whose words the texts then are, and which reads the calls out of them.
    """

    async def episode():
        host = EnvironmentHost(make_env, timeout=60.0, name="task")
        replies = [await host.handle(EnvironmentCall(0, 3, 1, "reset", {"row": row, "seed": 5}))]
        assert replies[0].error is None, replies[0].error
        for turn in turns:
            turn = turn(replies) if callable(turn) else turn
            argument = {"num_tokens": 9, "stopped": True} | _read(turn, chat)
            replies.append(await host.handle(EnvironmentCall(1, 3, 1, "turn", argument)))
            assert replies[-1].error is None, replies[-1].error
            if replies[-1].result["messages"] is None:
                break
            if chat is not None:  # every word of it is in the vocabulary
                chat.render_reply([], ModelTurn([], "", []), replies[-1].result["messages"], [])
        return replies

    return asyncio.run(episode())


def call(name, error=None, **arguments):
    return {"name": name, "arguments": arguments, "error": error}


def told(reply):
    """What the model reads after a turn."""
    return [message["content"] for message in reply.result["messages"]]


def _read(turn, chat):
    if not isinstance(turn, str):
        return {"text": "", "tool_calls": turn}
    if chat is None:
        return {"text": turn, "tool_calls": []}
    ids = chat.render_reply([], ModelTurn([], "", []), [{"role": "assistant", "content": turn}], []).tokens
    text, calls = chat.parse_turn(ids)
    return {"text": text, "tool_calls": calls}
